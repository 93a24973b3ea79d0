"""The reducer alone, on one process: what happens in which order, and what a backward may leave behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minddp.core import backward_end
from minddp.core.backward_pass import Phase
from minddp.core.events import EventKind
from minddp.core.packing import LARGE_BYTES
from minddp.core.reduction import AllReduceStrategy
from tests.fakes import FakeDDP, FakeTransport
from tests.logs import must_log
from tests.modules import Checkpointed, Explosive, Heads, HidesItsOutput, Scales, SharedByCheckpoints

PARAM_READY, LAUNCHED = EventKind.PARAM_READY, EventKind.BUCKET_LAUNCHED
ONE_EACH = [0]  # bucket_cap_mb_list: every parameter has a bucket of its own, also before the rebuild
X = torch.ones(1, 2)


def assert_gradients_as_alone(ddp: FakeDDP, output: torch.Tensor | None = None) -> None:
    """The peers hold the same, so the mean is what one process would have. `output` is that of the module."""
    params = list(ddp.module.parameters())
    expected = torch.autograd.grad((ddp.module(X) if output is None else output).sum(), params)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, expected, strict=True))


# ------------------------------------------------------------------ order


def test_the_events_of_a_step() -> None:
    ddp = FakeDDP(Scales([0, 1]), bucket_cap_mb_list=ONE_EACH)
    ddp.step(X)
    of_a_bucket = ("packing begins", "packed", "bucket ready", "bucket launched")
    assert ddp.take_events() == [
        "backward begins",
        *["parameter ready: 1", *(f"{what}: 0" for what in of_a_bucket)],
        *["parameter ready: 0", *(f"{what}: 1" for what in of_a_bucket)],
        "gradients complete",
        *["bucket waited: 0", "bucket unpacked: 0"],
        *["bucket waited: 1", "bucket unpacked: 1"],
        "backward ends",
    ]


def test_buckets_are_launched_in_plan_order_although_they_fill_in_another() -> None:
    ddp = FakeDDP(Scales([2, 0, 1]), bucket_cap_mb_list=ONE_EACH)  # ready 1, 0, 2; planned 2, 1, 0
    ddp.step(X)
    assert ddp.take_events(EventKind.BUCKET_READY, LAUNCHED) == [
        "bucket ready: 1",  # parameter 1: waits for bucket 0
        "bucket ready: 2",
        "bucket ready: 0",
        *["bucket launched: 0", "bucket launched: 1", "bucket launched: 2"],
    ]


def test_the_first_backward_travels_in_one_bucket_then_by_capacity() -> None:
    ddp = FakeDDP(Scales([0, 1, 2]), bucket_cap_mb=0)
    ddp.step(X)
    assert len(ddp.reducer.store.all()) == 1
    assert ddp.transport.calls == [("all_reduce", 3)]
    ddp.step(X)
    assert len(ddp.reducer.store.all()) == 3
    assert ddp.transport.calls[1:] == [("broadcast from 0", 3), *[("all_reduce", 1)] * 3]


def test_the_rebuild_follows_the_observed_order_once() -> None:
    ddp = FakeDDP(Scales([2, 0, 1]), bucket_cap_mb_list=ONE_EACH)
    assert [ddp.reducer.store.plan.names(b) for b in range(3)] == [["scales.2"], ["scales.1"], ["scales.0"]]
    ddp.step(X)
    ddp.take_events()
    ddp.step(X)
    assert [ddp.reducer.store.plan.names(b) for b in range(3)] == [["scales.1"], ["scales.0"], ["scales.2"]]
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
    assert [ddp.reducer.store.plan.names(b) for b in range(3)] == [["scales.1"], ["scales.2"], ["scales.0"]]


def test_no_rebuild_before_the_first_synchronised_backward() -> None:
    ddp = FakeDDP(Scales([0, 1]))
    ddp(X, sync=False).sum().backward()
    ddp(X, sync=False).sum().backward()
    assert ddp.transport.calls == []
    assert ddp.take_events() == ["gradient kept: 1", "gradient kept: 0"] * 2
    assert ddp.reducer.phase is Phase.IDLE


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("views", [False, True])
def test_the_mean_of_equal_gradients_is_the_gradient_of_one_process(views: bool) -> None:
    """Four ranks with the same gradients: scaled by 1/4 in packing, summed by the transport."""
    module = nn.Linear(2, 2)
    ddp = FakeDDP(module, FakeTransport(world_size=4), gradient_as_bucket_view=views)
    for _ in range(3):
        module.zero_grad()
        ddp.step(X)
        assert_gradients_as_alone(ddp)


def test_accumulated_gradients_are_reduced_as_one_sum() -> None:
    module = nn.Linear(2, 2)
    ddp = FakeDDP(module)
    for sync in (False, False, True):
        ddp(X, sync=sync).sum().backward()
    assert ddp.transport.calls == [("all_reduce", 6)]
    assert torch.equal(module.bias.grad, torch.tensor([3.0, 3.0]))


# ------------------------------------------------------------------ phases


def test_phases_of_a_step() -> None:
    ddp = FakeDDP(Scales([0]))
    assert ddp.reducer.phase is Phase.IDLE
    output = ddp(X)
    assert ddp.reducer.phase is Phase.PREPARED
    seen = []
    ddp.reducer.events.watch(lambda event: seen.append((event.kind, ddp.reducer.phase)))
    output.sum().backward()
    assert ddp.reducer.phase is Phase.IDLE
    assert seen[0] == (EventKind.BACKWARD_BEGIN, Phase.PREPARED)
    assert (EventKind.BUCKET_WAITED, Phase.FINALIZING) in seen
    assert seen[-1] == (EventKind.BACKWARD_END, Phase.IDLE)


def test_a_second_backward_through_one_graph_stays_local() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    loss = ddp(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert ddp.transport.count("all_reduce") == 1
    assert torch.equal(ddp.module.bias.grad, torch.tensor([2.0, 2.0]))
    ddp.step(X)
    assert ddp.transport.count("all_reduce") == 2


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16, lambda module: module.double().float()])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=repr)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_parameters_that_were_converted_after_wrapping_are_an_error(
    convert: Callable[[nn.Module], nn.Module], options: dict[str, Any], steps_before: int
) -> None:
    """Also if the conversion was undone: their hooks are at nodes that autograd has replaced."""
    ddp = FakeDDP(nn.Linear(2, 2), **options)
    for _ in range(steps_before):
        ddp.step(X)
    convert(ddp.module)
    with pytest.raises(RuntimeError, match="not averaged: parameters, such as `weight`, were converted or moved"):
        ddp.step(X.to(ddp.module.weight.dtype))


@pytest.mark.parametrize(
    ("options", "steps_before", "freezes"),
    [
        *[({"find_unused_parameters": True}, 0, False), ({"find_unused_parameters": True}, 2, False)],
        ({"static_graph": True}, 0, False),
        *[(options, 1, True) for options in ({}, {"find_unused_parameters": True}, {"static_graph": True})],
    ],
    ids=repr,
)
def test_a_part_that_was_converted_is_an_error_and_does_not_count_as_unused(
    options: dict[str, Any], steps_before: int, freezes: bool
) -> None:
    """If the rest is frozen, no hook fires at all: torch leaves the gradients local."""
    ddp = FakeDDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **options)
    for _ in range(steps_before):
        ddp.step(X)
    ddp.module[0].requires_grad_(not freezes)
    ddp.module[1].double().float()
    launched = ddp.transport.count("all_reduce")
    with pytest.raises(
        RuntimeError, match=r"not averaged: parameters, such as `1\.weight`, were converted or moved"
    ):
        ddp.step(X)
    assert ddp.transport.count("all_reduce") == launched


def test_a_backward_that_reaches_no_parameter_is_no_error() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    x = X.clone().requires_grad_()
    for _ in range(2):
        torch.autograd.grad(ddp(x).sum(), x)
    ddp.module.weight.requires_grad_(False)
    torch.autograd.grad(ddp(x).sum(), x)
    assert ddp.transport.calls == []


@pytest.mark.parametrize("losses", [1, 2])
def test_two_forwards_reduce_one_backward(losses: int) -> None:
    """As torch: one forward too many leaves a second backward without an arming of its own."""
    ddp = FakeDDP(nn.Linear(2, 2))
    outputs = [ddp(X), ddp(X)]
    for loss in outputs if losses == 2 else [outputs[0] + outputs[1]]:
        loss.sum().backward()
    assert ddp.transport.count("all_reduce") == 1
    assert torch.equal(ddp.module.bias.grad, torch.tensor([2.0, 2.0]))


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


# ------------------------------------------------------------------ interrupted backward


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("views", [False, True])
def test_the_step_after_an_interrupted_backward_is_as_any_other(where: int, views: bool) -> None:
    ddp = FakeDDP(
        Scales([0, 1, 2], explode_after=where), bucket_cap_mb_list=ONE_EACH, gradient_as_bucket_view=views
    )
    ddp.fail(X)
    assert ddp.reducer.phase is Phase.ACCUMULATING
    for _ in range(2):
        ddp.module.zero_grad()
        ddp.take_events()
        ddp.step(X)
        assert ddp.take_events(LAUNCHED) == ["bucket launched: 0", "bucket launched: 1", "bucket launched: 2"]
        assert_gradients_as_alone(ddp)
    assert ddp.reducer.phase is Phase.IDLE


def test_what_was_launched_before_the_exception_is_waited_for() -> None:
    """Its buffer must not be packed again while it is being reduced."""
    ddp = FakeDDP(Scales([0, 1], explode_after=0), bucket_cap_mb_list=ONE_EACH)
    ddp.fail(X)
    (reduction,) = ddp.reducer.current.reductions
    ddp.reducer.ensure_finished()
    assert reduction.work._done
    assert ddp.reducer.phase is Phase.IDLE


def test_after_an_interrupted_backward_others_may_stay_local() -> None:
    ddp = FakeDDP(Scales([0, 1], explode_after=0))
    ddp.fail(X)
    ddp.take_events()
    ddp(X, sync=False).sum().backward()
    assert ddp.take_events(EventKind.GRADIENT_KEPT) == ["gradient kept: 1", "gradient kept: 0"]
    assert ddp.transport.calls == []


def test_an_interrupted_backward_with_a_reentrant_checkpoint() -> None:
    """The nested backward has ended when the outer one raises."""
    ddp = FakeDDP(Checkpointed())
    ddp.fail(X)
    ddp.step(X)
    assert ddp.transport.count("all_reduce") == 1


# ------------------------------------------------------------------ nested backwards, [Note: which backward ends]


def test_a_reentrant_checkpoint_is_reduced_once() -> None:
    ddp = FakeDDP(Checkpointed(), bucket_cap_mb_list=ONE_EACH)
    for _ in range(2):
        ddp.module.zero_grad()
        ddp.step(X)
        assert_gradients_as_alone(ddp, ddp.module.second(ddp.module.first(X)))
    assert ddp.transport.count("all_reduce") == 8


def test_the_first_gradient_may_come_in_a_nested_backward(caplog) -> None:
    """Nothing shows in the output, so only the nested backward is known at first; its end is not the end."""
    ddp = FakeDDP(HidesItsOutput(Checkpointed()))
    for step in range(3):
        ddp(X).tensor.sum().backward()
        assert ddp.reducer.phase is Phase.IDLE
        assert ddp.transport.count("all_reduce") == step + 1
    assert caplog.records == []


def test_what_is_finalized_in_a_nested_backward_is_not_finalized_again() -> None:
    """Only the checkpointed layer has parameters. The outer backward has an end of its own."""
    module = Checkpointed()
    module.first.requires_grad_(False)
    ddp = FakeDDP(module)
    x = X.clone().requires_grad_()
    ddp.step(x)
    assert ddp.take_events(EventKind.BACKWARD_END) == ["backward ends"]
    ddp.step(x)
    assert ddp.take_events(EventKind.BACKWARD_END) == ["backward ends"]


@pytest.mark.parametrize("static", [False, True])
def test_a_whole_module_in_a_reentrant_checkpoint_is_reduced_in_its_nested_backward(static: bool) -> None:
    ddp = FakeDDP(nn.Linear(2, 2), static_graph=static)
    for _ in range(3):
        x = X.clone().requires_grad_()
        checkpoint(ddp, x, use_reentrant=True).sum().backward()
        assert ddp.take_events(EventKind.BACKWARD_END) == ["backward ends"]


def test_a_forward_while_a_backward_runs_in_another_thread_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for one that an exception has ended, and dropped."""
    monkeypatch.setattr(backward_end, "FREED_WITHIN_S", 0.01)
    ddp = FakeDDP(Scales([0, 1]))
    optimizer = torch.optim.SGD(ddp.module.parameters(), lr=1.0)
    is_running, may_end = threading.Event(), threading.Event()

    def wait(_grad: torch.Tensor) -> None:
        is_running.set()
        may_end.wait(10.0)

    ddp.module.scales[0].register_hook(wait)
    with ThreadPoolExecutor(1) as other:
        backward = other.submit(ddp(X).sum().backward)
        assert is_running.wait(10.0)
        for act in (lambda: ddp(X), optimizer.step):
            with pytest.raises(RuntimeError, match="a backward of this wrapper is still running"):
                act()
        may_end.set()
        backward.result()
    assert_gradients_as_alone(ddp)
    assert ddp.reducer.phase is Phase.IDLE


# ------------------------------------------------------------------ [Note: once per backward]


def test_a_parameter_in_two_reentrant_checkpoints_is_ready_twice() -> None:
    ddp = FakeDDP(SharedByCheckpoints(first=nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match=r"ready only once.*index \d with name layer\.(weight|bias)"):
        ddp.step(X)


class ChangesItsPath(nn.Module):
    """Four layers. From some step on, one of them is used in two reentrant checkpoints, the inner one nested."""

    def __init__(self) -> None:
        super().__init__()
        for name in "cqba":
            setattr(self, name, nn.Linear(4, 4))
        self.reuses = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.reuses:
            return self.a(self.b(self.q(self.c(x))))
        inner = checkpoint(self.b, self.c(x), use_reentrant=True)
        return self.a(checkpoint(self.b, self.q(inner), use_reentrant=True))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize(
    ("static", "text"), [(False, "ready only once"), (True, "Your training graph has changed in this iteration")]
)
def test_a_layer_that_is_reused_from_some_step_on_is_an_error(static: bool, text: str, views: bool) -> None:
    """Its first gradient alone has filled a small bucket, which has been launched when the second one comes."""
    ddp = FakeDDP(
        ChangesItsPath(), bucket_cap_mb_list=[0.000136, 1], static_graph=static, gradient_as_bucket_view=views
    )
    x = torch.ones(3, 4)
    for _ in range(3):
        ddp.module.zero_grad()
        ddp.step(x)
        assert ddp.reducer.phase is Phase.IDLE
    ddp.module.reuses = True
    for _ in range(2):  # an error in every step, not only in the first
        ddp.module.zero_grad()
        with pytest.raises(RuntimeError, match=rf"{text}(.|\n)*b\.(weight|bias)"):
            ddp.step(x)
        if static:
            with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
                ddp(x)
            return
    ddp.module.reuses = False
    ddp.module.zero_grad()
    ddp.step(x)
    expected = torch.autograd.grad(ddp.module(x).sum(), list(ddp.module.parameters()))
    assert all(map(torch.equal, (p.grad for p in ddp.module.parameters()), expected))


def test_a_gradient_that_comes_again_after_all_buckets_were_launched_is_an_error() -> None:
    ddp = FakeDDP(Scales([0]))
    used_again = ddp.module.scales[0]

    def again(_param: nn.Parameter) -> None:
        handle.remove()
        with torch.enable_grad():
            checkpoint(lambda x: x * used_again, X.clone().requires_grad_(), use_reentrant=True).sum().backward()

    handle = used_again.register_post_accumulate_grad_hook(again)
    with pytest.raises(RuntimeError, match="ready only once"):
        ddp.step(X)


# ------------------------------------------------------------------ what the end of backward waits for


def test_the_end_of_backward_waits_for_the_futures_of_buffer_hooks() -> None:
    ddp = FakeDDP(Scales([0]))
    failed: torch.futures.Future = torch.futures.Future()
    failed.set_exception(OSError("the hook's future"))
    output = ddp(X).sum()
    ddp.reducer.futures.append(failed)
    with pytest.raises(OSError, match="the hook's future"):
        output.backward()
    ddp.step(X)
    assert ddp.reducer.phase is Phase.IDLE


# ------------------------------------------------------------------ finalized by the caller


def test_the_caller_may_finalize() -> None:
    ddp = FakeDDP(Scales([0, 1]), bucket_cap_mb_list=ONE_EACH)
    for _ in range(2):
        ddp.module.zero_grad()
        ddp(X, finalize_at_end=False).sum().backward()
        assert ddp.reducer.phase is Phase.REDUCING
        assert ddp.take_events(EventKind.BUCKET_WAITED) == []
        ddp.reducer.finish()
        assert ddp.take_events(EventKind.BUCKET_WAITED) == ["bucket waited: 0", "bucket waited: 1"]
        assert ddp.reducer.phase is Phase.IDLE
        assert_gradients_as_alone(ddp)


def test_what_is_complete_may_be_finalized_within_backward() -> None:
    ddp = FakeDDP(Scales([0, 1]))
    ddp.module.scales[0].register_hook(lambda _grad: None)
    x = X.clone().requires_grad_()
    x.register_hook(lambda _grad: ddp.reducer.finish())
    y = x.exp()  # its gradient comes after those of the parameters
    ddp(y, finalize_at_end=False).sum().backward()
    assert ddp.reducer.phase is Phase.IDLE
    assert ddp.take_events(EventKind.BACKWARD_END) == ["backward ends"]


def test_there_must_be_something_to_finalize() -> None:
    ddp = FakeDDP(Heads())
    ddp.reducer.finalizes_at_end = False

    def forward() -> torch.Tensor:
        return ddp(X, finalize_at_end=False)[0]

    for prepare in (lambda: None, forward, lambda: forward().sum().backward()):
        prepare()
        with pytest.raises(RuntimeError, match=r"finalize_backward\(\) called (but no|before all)"):
            ddp.reducer.finish()


def test_a_second_backward_before_it_is_finalized_is_an_error() -> None:
    ddp = FakeDDP(Scales([0, 1]))
    output = ddp(X, finalize_at_end=False).sum()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ready only once"):
        output.backward()


# ------------------------------------------------------------------ a rank without inputs, other ranks, other plans


def test_the_ranks_may_change_after_an_unfinished_backward() -> None:
    ddp = FakeDDP(Heads())
    ddp(X)[0].sum().backward()
    others = FakeTransport(world_size=3)
    of_old_ranks = ddp.reducer.store.all()
    ddp.reducer.change_ranks(others, ddp.reducer.reduce_strategy)
    assert ddp.reducer.phase is Phase.IDLE
    torch.optim.SGD(ddp.module.parameters(), lr=0.1).step()
    ddp.reducer.rebuild_if_due()
    left, right = ddp.module(X)
    ddp.reducer.prepare_for_backward((left, right))
    (left + right).sum().backward()
    assert not {id(bucket) for bucket in of_old_ranks} & {id(bucket) for bucket in ddp.reducer.store.all()}
    ddp.reducer.rebuild_if_due()
    assert others.count("broadcast from 0") == 1, "the ranks agree on their order anew"


class Large(nn.Module):
    """Two parameters, each a pack group by itself; backward may fail between them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(LARGE_BYTES // 4)) for _ in range(2)])
        self.explosive = Explosive()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.explosive(x * self.weights[0]) * self.weights[1]


def test_if_the_ranks_change_after_an_exception_packed_gradients_have_their_values() -> None:
    ddp = FakeDDP(Large(), gradient_as_bucket_view=True)
    ddp.step(torch.ones(1))  # of all ranks alike, so the average is 1
    ddp.fail(torch.ones(1))
    assert ddp.reducer.current.packed
    ddp.reducer.change_ranks(ddp.transport, ddp.reducer.reduce_strategy)
    assert [float(weight.grad.mean()) for weight in ddp.module.weights] == [1.0, 2.0]
    ddp.module.explosive.arm(False)
    ddp.step(torch.ones(1))
    assert [float(weight.grad.mean()) for weight in ddp.module.weights] == [2.0, 3.0]


def test_what_is_under_way_when_the_ranks_change_writes_to_no_bucket() -> None:
    ddp = FakeDDP(Scales([0, 1], explode_after=0), bucket_cap_mb_list=ONE_EACH)
    ddp.fail(X)
    (reduction,) = ddp.reducer.current.reductions
    ddp.reducer.change_ranks(ddp.transport, ddp.reducer.reduce_strategy)
    for bucket in ddp.reducer.store.all():
        bucket.comm_buffer.fill_(1)
    reduction.work.wait()
    assert all(float(bucket.comm_buffer) == 1 for bucket in ddp.reducer.store.all())


@pytest.mark.parametrize("when", ["before", "armed", "in backward", "unfinished"])
def test_another_plan_is_adopted_between_backwards_only(when: str) -> None:
    ddp = FakeDDP(Heads())
    plan = FakeDDP(Heads(), bucket_cap_mb_list=ONE_EACH).reducer.store.plan
    errors: list[str] = []

    def adopt(*_: object) -> None:
        try:
            ddp.reducer.adopt(plan)
        except RuntimeError as error:
            errors.append(str(error))

    if when == "before":
        adopt()
    left, right = ddp(X)
    if when == "armed":
        adopt()
    if when == "in backward":
        ddp.module.left.weight.register_post_accumulate_grad_hook(adopt)
    (left if when == "unfinished" else left + right).sum().backward()
    if when == "unfinished":
        adopt()
    assert len(ddp.reducer.store.all()) == (4 if when in ("before", "armed") else 1)
    phases = {"in backward": "ACCUMULATING", "unfinished": "INCOMPLETE"}
    assert len(errors) == (when in phases)
    assert all(phases[when] in error for error in errors)


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
    output = ddp(X)  # keeps the accumulators, at which the hooks are registered
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
            ddp.step(X)
            ddp.step(X)
            alive += [weakref.ref(ddp.reducer), weakref.ref(ddp.reducer.store.all()[0])]
            del ddp
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


class Referring(AllReduceStrategy):
    """As a communication hook whose state refers to the wrapper."""

    def __init__(self, ddp: FakeDDP):
        super().__init__(ddp.transport, lambda: 2.0)
        self.ddp = ddp


def test_a_wrapper_dropped_after_an_exception_leaves_no_hooks_although_what_reduces_refers_to_it() -> None:
    module = Heads()
    ddp = FakeDDP(module)
    ddp.reducer.reduce_strategy = Referring(ddp)
    module.left.weight.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sum(ddp(X)).sum().backward()
    assert ddp.reducer.phase is Phase.ACCUMULATING
    alive = weakref.ref(ddp.reducer)
    del ddp
    gc.collect()
    assert alive() is None


def test_what_reduces_is_not_exchanged_in_a_backward() -> None:
    """The gradients are scaled for the former one."""
    ddp = FakeDDP(Heads(), bucket_cap_mb_list=[1])
    left, right = ddp(X)
    with must_log("has produced no gradient"):
        left.sum().backward()
    ddp.reducer.reduce_strategy = Referring(ddp)
    with pytest.raises(RuntimeError, match="registered while a backward had yet to reduce bucket 0"):
        right.sum().backward()
    assert ddp.transport.calls == []


@pytest.mark.parametrize("cap_mb", [0, 25])
def test_after_an_exception_a_script_may_add_to_gradients_that_are_views(cap_mb: int) -> None:
    """Launched buckets hold averages. In others, large gradients have been packed before their bucket was full."""
    module = nn.Sequential(*(nn.Linear(160, 160) for _ in range(3)))
    x = torch.ones(1, 160)
    ddp = FakeDDP(module, gradient_as_bucket_view=True, bucket_cap_mb_list=[cap_mb])
    ddp.step(x)
    module.zero_grad()
    ddp.step(x)  # the buckets are rebuilt
    once = [param.grad.clone() for param in module.parameters()]
    module.zero_grad()
    handle = module[1].weight.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp.step(x)
    handle.remove()
    assert (len(ddp.reducer.current.reductions), bool(ddp.reducer.current.packed)) == (0 if cap_mb else 3, True)
    ddp.step(x)
    times = [param.grad / grad for param, grad in zip(module.parameters(), once, strict=True)]
    assert [t[grad != 0].unique().tolist() for t, grad in zip(times, once, strict=True)] == [
        *([[1.0]] * 3),  # the exception came before these
        *([[2.0]] * 3),
    ]


def test_a_second_backward_after_a_failed_one_is_finalized_without_a_forward() -> None:
    """The first backward raises between the outputs and the parameters; the end of the second is awaited anew."""
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
