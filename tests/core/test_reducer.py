"""The reducer alone, on one process: what happens in which order, and what a backward may leave behind."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minddp.core.backward_pass import ALLOWED, Phase
from minddp.core.events import EventKind
from tests.fakes import FakeDDP, FakeTransport

PARAM_READY, LAUNCHED = EventKind.PARAM_READY, EventKind.BUCKET_LAUNCHED
ONE_EACH = [0]  # bucket_cap_mb_list: every parameter has a bucket of its own, also before the rebuild
X = torch.ones(1, 2)


class Explode(torch.autograd.Function):
    """The identity, whose backward raises while `Explode.armed`."""

    armed = False

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        if Explode.armed:
            raise KeyError("exploded")
        return grad


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    torch.manual_seed(0)
    Explode.armed = False
    yield
    Explode.armed = False


class Scales(nn.Module):
    """Multiplies by scalars in an order of its own: gradients become ready from the last used to the first."""

    def __init__(self, use_order: list[int], explode_before: int | None = None):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(float(i + 2))) for i in range(len(use_order))])
        self.use_order = use_order
        self.explode_before = explode_before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.use_order:
            x = x * self.scales[index]
            if index == self.explode_before:
                x = Explode.apply(x)
        return x


class Heads(nn.Module):
    """Two outputs with parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(2, 2)
        self.right = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


class Checkpointed(nn.Module):
    def __init__(self, explode: bool = False):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.explode = explode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return checkpoint(self.second, Explode.apply(x) if self.explode else x, use_reentrant=True)


class SharedByCheckpoints(nn.Module):
    """One layer in two reentrant checkpoints: its hooks fire twice, in nested backwards."""

    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) if self.first is not None else x.requires_grad_()
        x = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True)


def shares(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


# ------------------------------------------------------------------ order


def test_a_step_is_told_in_order() -> None:
    ddp = FakeDDP(Scales([0, 1]), bucket_cap_mb_list=ONE_EACH)
    ddp.step(X)
    assert ddp.take_events() == [
        "backward begins",
        *["parameter ready: 1", "packing begins: 0", "packed: 0", "bucket ready: 0", "bucket launched: 0"],
        *["parameter ready: 0", "packing begins: 1", "packed: 1", "bucket ready: 1", "bucket launched: 1"],
        "gradients complete",
        *["bucket waited: 0", "bucket unpacked: 0"],
        *["bucket waited: 1", "bucket unpacked: 1"],
        "backward ends",
    ]


def test_buckets_leave_in_plan_order_although_they_fill_in_another() -> None:
    ddp = FakeDDP(Scales([2, 0, 1]), bucket_cap_mb_list=ONE_EACH)  # ready 1, 0, 2; planned 2, 1, 0
    ddp.step(X)
    assert ddp.take_events(EventKind.BUCKET_READY, LAUNCHED) == [
        "bucket ready: 1",  # parameter 1: waits for bucket 0
        "bucket ready: 2",
        "bucket ready: 0",
        *["bucket launched: 0", "bucket launched: 1", "bucket launched: 2"],
    ]


def test_buckets_leave_while_backward_goes_on() -> None:
    ddp = FakeDDP(Scales([0, 1, 2]), bucket_cap_mb_list=ONE_EACH)
    ddp.step(X)
    story = ddp.take_events(PARAM_READY, LAUNCHED, EventKind.BUCKET_WAITED)
    assert story.index("bucket launched: 0") < story.index("parameter ready: 1")
    assert story.index("bucket launched: 2") < story.index("bucket waited: 0")


def test_the_first_backward_travels_in_one_bucket_then_by_capacity() -> None:
    ddp = FakeDDP(Scales([0, 1, 2]), bucket_cap_mb=0)
    ddp.step(X)
    assert len(ddp.reducer.buckets) == 1
    assert ddp.transport.calls == [("all_reduce", 3)]
    ddp.step(X)
    assert len(ddp.reducer.buckets) == 3
    assert ddp.transport.calls[1:] == [("broadcast from 0", 3), *[("all_reduce", 1)] * 3]


def test_the_rebuild_follows_the_observed_order_once() -> None:
    ddp = FakeDDP(Scales([2, 0, 1]), bucket_cap_mb_list=ONE_EACH)
    assert [ddp.reducer.plan.names(b) for b in range(3)] == [["scales.2"], ["scales.1"], ["scales.0"]]
    ddp.step(X)
    ddp.take_events()
    ddp.step(X)
    assert [ddp.reducer.plan.names(b) for b in range(3)] == [["scales.1"], ["scales.0"], ["scales.2"]]
    assert ddp.take_events(EventKind.BUCKETS_REBUILT, LAUNCHED) == [
        "buckets rebuilt: 3",
        *["bucket launched: 0", "bucket launched: 1", "bucket launched: 2"],
    ]
    ddp.module.use_order = [0, 1, 2]
    ddp.step(X)
    ddp.step(X)
    assert ddp.transport.count("broadcast from 0") == 1
    assert ddp.take_events(EventKind.BUCKETS_REBUILT) == []


def test_the_rebuild_follows_rank_0s_order() -> None:
    transport = FakeTransport(rank=1, from_rank_0=torch.tensor([1, 2, 0]))
    ddp = FakeDDP(Scales([0, 1, 2]), transport, bucket_cap_mb_list=ONE_EACH)
    ddp.step(X)
    ddp.step(X)
    assert [ddp.reducer.plan.names(b) for b in range(3)] == [["scales.1"], ["scales.2"], ["scales.0"]]


def test_no_rebuild_where_the_order_may_change() -> None:
    ddp = FakeDDP(Scales([2, 0, 1]), bucket_cap_mb_list=ONE_EACH, find_unused_parameters=True)
    for _ in range(3):
        with warnings.catch_warnings(record=True):
            ddp.step(X)
    assert ddp.transport.count("broadcast from 0") == 0
    assert ddp.take_events(EventKind.BUCKETS_REBUILT) == []


def test_no_rebuild_before_the_first_synchronised_backward() -> None:
    ddp = FakeDDP(Scales([0, 1]))
    ddp(X, sync=False).sum().backward()
    ddp(X, sync=False).sum().backward()
    assert ddp.transport.calls == []
    assert ddp.take_events() == ["gradient kept: 1", "gradient kept: 0"] * 2


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("views", [False, True])
def test_equal_peers_leave_the_gradient_as_it_would_be_alone(views: bool) -> None:
    """Four ranks with the same gradients: scaled by 1/4 in packing, summed by the transport."""
    module = nn.Linear(2, 2)
    ddp = FakeDDP(module, FakeTransport(world_size=4), gradient_as_bucket_view=views)
    for _ in range(3):
        module.zero_grad()
        ddp.step(X)
        expected = torch.autograd.grad(module(X).sum(), list(module.parameters()))
        assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))


def test_accumulated_gradients_are_reduced_as_one_sum() -> None:
    module = nn.Linear(2, 2)
    ddp = FakeDDP(module)
    for sync in (False, False, True):
        ddp(X, sync=sync).sum().backward()
    assert ddp.transport.calls == [("all_reduce", 6)]
    assert torch.equal(module.bias.grad, torch.tensor([3.0, 3.0]))


KEPT = {
    "itself": (lambda grad: grad, lambda kept: kept),
    "a view": (lambda grad: grad.flatten()[:3], lambda kept: kept),
    "detached": (lambda grad: grad.detach(), lambda kept: kept),
    "an array": (lambda grad: grad.numpy(), torch.from_numpy),
    "a capsule": (torch.utils.dlpack.to_dlpack, torch.utils.dlpack.from_dlpack),
    "in a graph": (lambda grad: grad * torch.ones(1, requires_grad=True), lambda kept: kept),
    "in a future": (lambda grad: _done(grad), lambda kept: kept.wait()),
}


def _done(value: torch.Tensor) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize("how", KEPT)
def test_what_a_script_keeps_of_a_gradient_stays_as_it_is(how: str) -> None:
    """Although minddp hands over its buffers as gradients and fills them again in the next backward."""
    keep, read = KEPT[how]
    module = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    ddp = FakeDDP(module)
    x = torch.ones(1, 128)
    for _ in range(2):
        module.zero_grad()
        ddp.step(x)
    memory = {bucket.flat.untyped_storage().data_ptr() for bucket in ddp.reducer.buckets}
    handed_over = [p for p in module.parameters() if p.grad.untyped_storage().data_ptr() in memory]
    assert handed_over, "or this test shows nothing"
    kept = [keep(param.grad) for param in handed_over]
    values = [param.grad.clone() for param in handed_over]
    module.zero_grad()
    ddp.step(5 * x)
    for one, value in zip(kept, values, strict=True):
        now = read(one)
        assert torch.equal(now.flatten(), value.flatten()[: now.numel()])


# ------------------------------------------------------------------ phases


def test_phases_of_a_step() -> None:
    ddp = FakeDDP(Scales([0]))
    assert ddp.reducer.phase is Phase.IDLE
    output = ddp(X)
    assert ddp.reducer.phase is Phase.ARMED
    seen = []
    ddp.reducer.events.watch(lambda event: seen.append((event.kind, ddp.reducer.phase)))
    output.sum().backward()
    assert ddp.reducer.phase is Phase.IDLE
    assert seen[0] == (EventKind.BACKWARD_BEGIN, Phase.ARMED)
    assert (EventKind.BUCKET_WAITED, Phase.FINALIZING) in seen
    assert seen[-1] == (EventKind.BACKWARD_END, Phase.IDLE)


@pytest.mark.parametrize("start", Phase)
@pytest.mark.parametrize("end", Phase)
def test_transitions_that_are_not_allowed_raise(start: Phase, end: Phase) -> None:
    reducer = FakeDDP(Scales([0])).reducer
    reducer.phase = start
    if end in ALLOWED[start]:
        reducer._move_to(end)
        assert reducer.phase is end
    else:
        with pytest.raises(RuntimeError, match=f"phase {start.name} cannot become {end.name}"):
            reducer._move_to(end)


def test_a_backward_nobody_armed_stays_local() -> None:
    ddp = FakeDDP(Scales([0, 1]))
    ddp(X, sync=False).sum().backward()
    assert ddp.transport.calls == []
    assert ddp.reducer.phase is Phase.IDLE


def test_a_second_backward_through_one_graph_stays_local() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    loss = ddp(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert ddp.transport.count("all_reduce") == 1
    assert torch.equal(ddp.module.bias.grad, torch.tensor([2.0, 2.0]))
    ddp.step(X)
    assert ddp.transport.count("all_reduce") == 2


def test_two_forwards_then_one_backward() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    (ddp(X) + ddp(X)).sum().backward()
    assert ddp.transport.count("all_reduce") == 1
    assert torch.equal(ddp.module.bias.grad, torch.tensor([2.0, 2.0]))


def test_two_forwards_then_two_backwards_reduce_the_first_only() -> None:
    """As torch: one forward too many leaves the second backward without an arming of its own."""
    ddp = FakeDDP(nn.Linear(2, 2))
    one, two = ddp(X), ddp(X)
    one.sum().backward()
    two.sum().backward()
    assert ddp.transport.count("all_reduce") == 1


def test_two_backwards_that_share_the_parameters_between_them() -> None:
    ddp = FakeDDP(Heads())
    left, right = ddp(X)
    left.sum().backward()
    assert ddp.reducer.phase is Phase.INCOMPLETE
    assert ddp.transport.calls == []
    right.sum().backward()
    assert ddp.reducer.phase is Phase.IDLE
    assert ddp.transport.calls == [("all_reduce", 12)]
    ddp.reducer.ensure_finished()


def test_a_forward_after_an_unfinished_backward_raises() -> None:
    ddp = FakeDDP(Heads())
    ddp(X)[0].sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        ddp(X)


# ------------------------------------------------------------------ interrupted backward


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("views", [False, True])
def test_the_step_after_an_interrupted_backward_is_as_any_other(where: int, views: bool) -> None:
    ddp = FakeDDP(
        Scales([0, 1, 2], explode_before=where), bucket_cap_mb_list=ONE_EACH, gradient_as_bucket_view=views
    )
    Explode.armed = True
    with pytest.raises(KeyError, match="exploded"):
        ddp.step(X)
    assert ddp.reducer.phase is Phase.ACCUMULATING
    Explode.armed = False
    for _ in range(2):
        ddp.module.zero_grad()
        ddp.take_events()
        ddp.step(X)
        assert ddp.take_events(LAUNCHED) == ["bucket launched: 0", "bucket launched: 1", "bucket launched: 2"]
        expected = torch.autograd.grad(ddp.module(X).sum(), list(ddp.module.parameters()))
        assert all(torch.equal(p.grad, g) for p, g in zip(ddp.module.parameters(), expected, strict=True))
    assert ddp.reducer.phase is Phase.IDLE


def test_what_was_launched_before_the_exception_is_waited_for() -> None:
    """Its buffer must not be packed again while it travels."""
    ddp = FakeDDP(Scales([0, 1], explode_before=0), bucket_cap_mb_list=ONE_EACH)
    Explode.armed = True
    with pytest.raises(KeyError):
        ddp.step(X)
    (reduction,) = ddp.reducer.current.reductions
    ddp.reducer.ensure_finished()
    assert reduction.work._done
    assert ddp.reducer.phase is Phase.IDLE


def test_an_interrupted_backward_with_a_reentrant_checkpoint() -> None:
    """The nested backward has ended when the outer one raises."""
    ddp = FakeDDP(Checkpointed(explode=True))
    Explode.armed = True
    with pytest.raises(KeyError):
        ddp.step(X)
    Explode.armed = False
    ddp.step(X)
    assert ddp.transport.count("all_reduce") == 1


def test_an_interrupted_first_backward_of_a_static_graph() -> None:
    ddp = FakeDDP(Scales([0, 1], explode_before=0), static_graph=True)
    Explode.armed = True
    with pytest.raises(KeyError):
        ddp.step(X)
    Explode.armed = False
    for step in range(3):
        ddp.step(X)
        assert ddp.transport.count("all_reduce") >= step + 1
        assert ddp.reducer.phase is Phase.IDLE


# ------------------------------------------------------------------ unused parameters


def unused_by(ddp: FakeDDP) -> list[str]:
    """Names of the parameters that were found unused in the last backward: ready before any gradient came."""
    story = ddp.take_events(EventKind.BACKWARD_BEGIN, PARAM_READY)
    ready = [int(line.partition(": ")[2]) for line in story[1:]]
    return [ddp.reducer.plan.params[param].name for param in ready if ddp.reducer.params[param].grad is None]


def test_an_unused_parameter_keeps_its_gradient_as_it_is() -> None:
    module = Heads()
    ddp = FakeDDP(module, find_unused_parameters=True)
    ddp(X)[0].sum().backward()
    assert module.right.weight.grad is None
    assert module.left.bias.grad is not None
    assert unused_by(ddp) == ["right.weight", "right.bias"]
    before = module.right.weight.grad = torch.full((2, 2), 5.0)
    ddp(X)[0].sum().backward()
    assert module.right.weight.grad is before
    assert torch.equal(before, torch.full((2, 2), 5.0))


def test_unused_is_what_the_loss_leaves_out_not_what_the_output_does() -> None:
    """Both heads are outputs; only one enters the loss, and another one in every step."""
    module = Heads()
    ddp = FakeDDP(module, find_unused_parameters=True)
    for side, idle in ((0, "right"), (1, "left"), (0, "right")):
        module.zero_grad()
        ddp.take_events()
        ddp(X)[side].sum().backward()
        assert ddp.reducer.phase is Phase.IDLE
        assert unused_by(ddp) == [f"{idle}.weight", f"{idle}.bias"]


def test_a_search_that_finds_nothing_is_told() -> None:
    ddp = FakeDDP(nn.Linear(2, 2), find_unused_parameters=True)
    with pytest.warns(UserWarning, match="did not find any unused parameters"):
        ddp.step(X)


def test_use_under_no_sync_counts() -> None:
    """The right head was used in the local step, so its sum is reduced although the synced step skips it."""
    module = Heads()
    ddp = FakeDDP(module, find_unused_parameters=True)
    with warnings.catch_warnings(record=True):
        ddp(X, sync=False)[1].sum().backward()
        local = shares(module)
        ddp(X)[0].sum().backward()
    assert torch.equal(module.right.weight.grad, local["right.weight"])  # both fake ranks hold the same
    assert bool(ddp.reducer.expectation.usage.sums.all())


def test_buckets_of_unused_parameters_stay_home_if_asked() -> None:
    ddp = FakeDDP(
        Heads(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb_list=ONE_EACH,
    )
    ddp(X)[0].sum().backward()
    assert ddp.take_events(LAUNCHED) == ["bucket launched: 2", "bucket launched: 3"]
    assert ddp.transport.calls == [("all_reduce", 2), ("all_reduce", 4), ("all_reduce", 4)]  # and the usage


def test_marks_of_an_interrupted_backward_do_not_count() -> None:
    """Nobody used `scales.1` in the step that is reduced, and its gradient was dropped: it stays None."""
    module = Scales([0, 1], explode_before=0)
    ddp = FakeDDP(module, find_unused_parameters=True)
    Explode.armed = True
    with warnings.catch_warnings(record=True), pytest.raises(KeyError):
        ddp.step(X)
    Explode.armed = False
    module.zero_grad()
    module.use_order = [0]
    ddp.step(X)
    assert module.scales[0].grad is not None
    assert module.scales[1].grad is None


# ------------------------------------------------------------------ nested backwards and static graphs


def test_a_reentrant_checkpoint_is_reduced_once() -> None:
    module = Checkpointed()
    ddp = FakeDDP(module)
    for _ in range(2):
        module.zero_grad()
        ddp.step(X)
        expected = torch.autograd.grad(module.second(module.first(X)).sum(), list(module.parameters()))
        assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))
    assert ddp.transport.count("all_reduce") == 2


def test_a_parameter_in_two_reentrant_checkpoints_is_ready_twice() -> None:
    ddp = FakeDDP(SharedByCheckpoints(first=nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match=r"ready only once.*index \d with name layer\.(weight|bias)"):
        ddp.step(X)


def test_a_static_graph_records_how_often_each_hook_fires() -> None:
    module = SharedByCheckpoints()
    ddp = FakeDDP(module, static_graph=True)
    expected = torch.autograd.grad(module.layer(module.layer(X)).sum(), list(module.parameters()))
    for _ in range(3):
        module.zero_grad()
        ddp.step(X.clone())
        assert ddp.reducer.phase is Phase.IDLE
        assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))
    assert ddp.transport.count("all_reduce") == 4  # three backwards, and once who uses what
    assert ddp.reducer.expectation.open().hooks_left == [2, 2]


class Hidden:
    """An output in which minddp finds no tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class HidesItsOutput(Checkpointed):
    def forward(self, x: torch.Tensor) -> Hidden:
        return Hidden(super().forward(x))


def test_a_static_graph_is_not_settled_at_the_end_of_a_nested_backward() -> None:
    """With nothing to hang on to in the output, the first hook fires in the nested backward."""
    module = HidesItsOutput()
    ddp = FakeDDP(module, static_graph=True)
    for _ in range(3):
        ddp(X).tensor.sum().backward()
        assert ddp.reducer.phase is Phase.IDLE
    assert ddp.reducer.expectation.open().hooks_left == [1, 1, 1, 1]


def test_a_static_graph_launches_nothing_before_the_end_of_its_first_backward() -> None:
    ddp = FakeDDP(Scales([0, 1]), static_graph=True, bucket_cap_mb_list=ONE_EACH)
    launched_early = []
    ddp.module.scales[0].register_post_accumulate_grad_hook(lambda _p: launched_early.extend(ddp.take_events(LAUNCHED)))
    ddp.step(X)
    assert launched_early == []
    ddp.take_events()
    ddp.step(X)
    assert launched_early == ["bucket launched: 0"]


def test_a_static_graph_that_changes_raises() -> None:
    ddp = FakeDDP(Heads(), static_graph=True)
    ddp(X)[0].sum().backward()
    ddp(X)[0].sum().backward()
    with pytest.raises(RuntimeError, match=r"graph has changed in this iteration.*`right\."):
        ddp(X)[1].sum().backward()


# ------------------------------------------------------------------ what a dropped wrapper leaves behind


def test_a_dropped_wrapper_leaves_no_hooks() -> None:
    module = nn.Linear(2, 2)
    first = FakeDDP(module)
    first.step(X)
    old = first.transport
    del first
    gc.collect()
    second = FakeDDP(module)
    module.zero_grad()
    second.step(X)
    assert old.calls == [("all_reduce", 6)]
    assert second.transport.calls == [("all_reduce", 6)]
    accumulator = torch.autograd.graph.get_gradient_edge(module.weight).node
    fired: list[int] = []
    accumulator.register_hook(lambda *_: fired.append(1))
    del second
    module(X).sum().backward()
    assert fired == [1]


def test_a_dropped_wrapper_takes_its_hooks_off_graphs_that_live_on() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    output = ddp(X)  # keeps the accumulators, on which the hooks sit
    handles = ddp.reducer.hooks._handles
    assert all(handle.id in handle.hooks_dict_ref() for handle in handles)
    del ddp
    assert not any(handle.id in (handle.hooks_dict_ref() or {}) for handle in handles)
    output.sum().backward()


@pytest.mark.parametrize("changed", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_wrapping_and_dropping_leaks_nothing(changed: dict[str, bool]) -> None:
    """Without the garbage collector: no reference cycles keep buckets alive."""
    module = nn.Linear(2, 2)
    alive: list[weakref.ref] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            ddp = FakeDDP(module, **changed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ddp.step(X)
                ddp.step(X)
            alive += [weakref.ref(ddp.reducer), weakref.ref(ddp.reducer.buckets[0])]
            del ddp
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


def test_a_wrapper_dropped_unfinished_does_not_guard_the_optimizer_for_ever() -> None:
    """Somebody met the error and wraps the module again, with find_unused_parameters=True."""
    module = Heads()
    first = FakeDDP(module)
    first(X)[0].sum().backward()
    del first
    gc.collect()
    second = FakeDDP(module, find_unused_parameters=True)
    second(X)[0].sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def test_a_second_try_without_a_forward_is_finalized() -> None:
    """The first backward dies between the outputs and the parameters; the end of the second is awaited anew."""
    ddp = FakeDDP(nn.Linear(2, 2))
    output = ddp(X)

    def explode(_grad: torch.Tensor) -> None:
        raise KeyError("boom")

    handle = output.register_hook(explode)
    with pytest.raises(KeyError):
        output.sum().backward(retain_graph=True)
    handle.remove()
    output.sum().backward()
    assert ddp.reducer.phase is Phase.IDLE
    assert ddp.transport.count("all_reduce") == 1


# ------------------------------------------------------------------ reentrant checkpoints


class HalfCheckpointed(nn.Module):
    """The second layer is recomputed in backward, in a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=True)


def test_what_a_nested_backward_reaches_does_not_count_as_found() -> None:
    """As torch: the graph at the outputs does not show the checkpointed layer, so its gradient is unexpected."""
    ddp = FakeDDP(HalfCheckpointed(), find_unused_parameters=True)
    with pytest.raises(RuntimeError, match=r"mark a variable ready only once.*`?second"):
        ddp.step(X)


def test_a_whole_module_in_a_reentrant_checkpoint_is_reduced_in_its_nested_backward() -> None:
    ddp = FakeDDP(nn.Linear(2, 2), static_graph=True)
    for _ in range(3):
        x = X.clone().requires_grad_()
        checkpoint(ddp, x, use_reentrant=True).sum().backward()
        assert ddp.take_events(EventKind.BACKWARD_END) == ["backward ends"]


class LendsALayer(nn.Module):
    """The loss applies a layer that forward does not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lent = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_with_find_unused_a_layer_used_outside_forward_is_an_error_as_in_torch() -> None:
    ddp = FakeDDP(LendsALayer(), find_unused_parameters=True)
    with pytest.raises(RuntimeError, match=r"ready only once.*index [23] with name lent\."):
        ddp.module.lent(ddp(X)).sum().backward()


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_what_only_one_of_two_forwards_uses_is_used_in_forward() -> None:
    class Either(LendsALayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.body if x.sum() > 0 else self.lent)(x)

    ddp = FakeDDP(Either(), find_unused_parameters=True)
    (ddp(X).sum() + ddp(-X).sum()).backward()
    assert all(param.grad is not None for param in ddp.module.parameters())
