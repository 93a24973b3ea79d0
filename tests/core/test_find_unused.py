"""`find_unused_parameters`: what each backward leaves out, and its gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from minddp.core import find_unused
from minddp.core.backward_pass import Phase
from minddp.core.events import EventKind
from minddp.core.find_unused import NAME_IN_PROFILES, out_of_reach_of
from minddp.modes.join import shadow_backward
from tests.fakes import FakeDDP
from tests.logs import logged
from tests.modules import Checkpointed, Heads, LendsALayer, Scales, grads_by_name

LAUNCHED = EventKind.BUCKET_LAUNCHED
ONE_EACH = [0]
X = torch.ones(1, 2)


def finding(module: nn.Module, **options: object) -> FakeDDP:
    return FakeDDP(module, find_unused_parameters=True, **options)


def left_out(ddp: FakeDDP) -> list[str]:
    """Names of the parameters that this rank left out of the last backward."""
    return [ddp.reducer.store.plan.params[param].name for param in ddp.reducer.usage_tracker.last_unused]


def test_an_unused_parameter_keeps_its_gradient_as_it_is() -> None:
    ddp = finding(Heads())
    ddp(X)[0].sum().backward()
    assert ddp.module.right.weight.grad is None
    assert ddp.module.left.bias.grad is not None
    assert left_out(ddp) == ["right.weight", "right.bias"]
    before = ddp.module.right.weight.grad = torch.full((2, 2), 5.0)
    ddp(X)[0].sum().backward()
    assert ddp.module.right.weight.grad is before
    assert torch.equal(before, torch.full((2, 2), 5.0))


def test_unused_is_what_the_loss_leaves_out_not_what_the_output_does() -> None:
    """Both heads are outputs; only one enters the loss, and another one in every step."""
    ddp = finding(Heads())
    for side, idle in ((0, "right"), (1, "left"), (0, "right")):
        ddp.module.zero_grad()
        ddp(X)[side].sum().backward()
        assert ddp.reducer.phase is Phase.IDLE
        assert left_out(ddp) == [f"{idle}.weight", f"{idle}.bias"]


def test_unused_parameters_are_ready_before_the_first_gradient_is_counted() -> None:
    ddp = finding(Heads())
    ddp(X)[1].sum().backward()
    first_two = ddp.take_events(EventKind.PARAM_READY)[:2]
    assert first_two == ["parameter ready: 0", "parameter ready: 1"]


@pytest.mark.filterwarnings("error")
def test_a_search_that_finds_nothing_is_said_once_in_a_process() -> None:
    find_unused._say_that_all_are_used.cache_clear()
    with logged() as texts:
        for _ in range(2):
            ddp = finding(nn.Linear(2, 2))
            ddp.step(X)
            ddp.step(X)
    assert ["did not find any unused parameters" in text for text in texts] == [True]


def test_the_search_is_in_profiles_by_torchs_name() -> None:
    ddp = finding(Heads())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ddp(X)[0].sum().backward()
    assert NAME_IN_PROFILES in {event.name for event in profile.events()}


def test_use_under_no_sync_counts() -> None:
    """The right head was used in the local step, so its sum is reduced although the synchronised step skips it."""
    ddp = finding(Heads())
    ddp(X, sync=False)[1].sum().backward()
    local = grads_by_name(ddp.module)
    ddp(X)[0].sum().backward()
    assert torch.equal(ddp.module.right.weight.grad, local["right.weight"])  # both fake ranks hold the same
    assert bool(ddp.reducer.usage_tracker.usage.sums.all())


def test_use_in_one_step_does_not_count_in_the_next() -> None:
    ddp = finding(Heads())
    ddp(X)[1].sum().backward()
    ddp.module.right.weight.grad = torch.full((2, 2), 5.0)
    ddp(X)[0].sum().backward()
    assert ddp.reducer.usage_tracker.usage.sums.tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize(("skips", "launched"), [(True, [2, 3]), (False, [0, 1, 2, 3])])
def test_buckets_of_unused_parameters_are_not_reduced_if_asked(skips: bool, launched: list[int]) -> None:
    ddp = finding(Heads(), skip_all_reduce_unused_params=skips, bucket_cap_mb_list=ONE_EACH)
    ddp(X)[0].sum().backward()
    assert ddp.take_events(LAUNCHED) == [f"bucket launched: {bucket}" for bucket in launched]
    assert ddp.transport.count("all_reduce") == len(launched) + 1  # and the usage


def test_no_rebuild_where_the_order_may_change() -> None:
    ddp = finding(Scales([2, 0, 1]), bucket_cap_mb_list=ONE_EACH)
    for _ in range(3):
        ddp.step(X)
    assert ddp.transport.count("broadcast from 0") == 0
    assert ddp.take_events(EventKind.BUCKETS_REBUILT) == []


def test_a_second_backward_through_other_outputs_is_reduced_too() -> None:
    ddp = finding(Heads())
    for step in range(1, 3):
        ddp.module.zero_grad()
        left, right = ddp(X)
        left.sum().backward()
        assert left_out(ddp) == ["right.weight", "right.bias"]
        right.sum().backward()
        assert left_out(ddp) == ["left.weight", "left.bias"]
        assert ddp.transport.count("all_reduce") == 4 * step
    assert ddp.reducer.phase is Phase.IDLE


def test_a_second_backward_is_reduced_if_the_first_has_left_an_output() -> None:
    """Even through the same output: on another rank it may be the other one. Else it stays local, as in torch."""
    ddp = finding(Heads())
    left, right = ddp(X)
    left.sum().backward(retain_graph=True)
    left.sum().backward(retain_graph=True)
    assert ddp.transport.count("all_reduce") == 4
    right.sum().backward(retain_graph=True)
    assert ddp.transport.count("all_reduce") == 6
    left.sum().backward()
    assert ddp.transport.count("all_reduce") == 6
    assert ddp.take_events(EventKind.GRADIENT_KEPT) != []


def test_a_forward_releases_the_graph_of_one_without_a_backward() -> None:
    """With it the activations, before the module runs again."""
    ddp = finding(nn.Linear(2, 2))
    ddp(X)
    ddp.reducer.ensure_finished()
    assert ddp.reducer.usage_tracker._output_nodes == []


# ------------------------------------------------------------------ exceptions


def test_marks_of_an_interrupted_backward_do_not_count() -> None:
    """`scales.1` is not used in the step that is reduced, and its gradient was dropped: it stays None."""
    ddp = finding(Scales([0, 1], explode_after=0))
    ddp.fail(X)
    ddp.module.scales[0].grad = None
    ddp.module.scales[1].grad = kept = torch.tensor(5.0)
    ddp.module.use_order = [0]
    ddp.step(X)
    assert ddp.module.scales[0].grad is not None
    assert ddp.module.scales[1].grad is kept
    assert ddp.reducer.usage_tracker.usage.sums.tolist() == [2, 0]


def test_marks_from_before_an_interrupted_backward_count() -> None:
    ddp = finding(Heads())
    ddp(X, sync=False)[1].sum().backward()
    failing = ddp.module.left.weight.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp(X)[0].sum().backward()
    failing.remove()
    ddp(X)[0].sum().backward()
    assert ddp.reducer.usage_tracker.usage.sums.tolist() == [2, 2, 2, 2]


def test_a_backward_that_reaches_no_parameter_says_nothing_of_the_next() -> None:
    """Both through one forward. The first one asks for the gradient of the input only."""
    ddp = finding(Heads())
    x = X.clone().requires_grad_()
    left, _right = ddp(x)
    torch.autograd.grad(left.sum(), x, retain_graph=True)
    left.sum().backward()
    assert left_out(ddp) == ["right.weight", "right.bias"]


def test_a_backward_that_does_not_come_in_at_the_outputs_settles_nothing() -> None:
    """One of a penalty on a weight comes first; the loss's backward brings the others and leaves the head out."""
    ddp = finding(Heads())
    left, _right = ddp(X)
    ddp.module.left.weight.square().sum().backward()
    assert ddp.transport.calls == []
    assert ddp.reducer.phase is Phase.INCOMPLETE
    assert left_out(ddp) == [], "both heads are among the outputs"
    ddp.reducer.change_ranks(ddp.transport, ddp.reducer.reduce_strategy)
    ddp.module.zero_grad()
    left = ddp(X)[0]
    left.sum().backward()
    assert left_out(ddp) == ["right.weight", "right.bias"]


# ------------------------------------------------------------------ what the outputs do not show, as in torch


def test_what_a_nested_backward_reaches_does_not_count_as_found() -> None:
    """The graph at the outputs does not show the checkpointed layer, so its gradient is unexpected."""
    ddp = finding(Checkpointed())
    with pytest.raises(RuntimeError, match=r"mark a variable ready only once.*`?second"):
        ddp.step(X)


@pytest.mark.parametrize(
    "loss",
    [
        lambda ddp: ddp.module.lent(ddp(X)),
        # The gradient enters at the outputs first, and the engine knows that it will reach the layer.
        lambda ddp: ddp.module.lent(X) + ddp(X),
    ],
    ids=["outside", "beside"],
)
def test_a_layer_used_outside_forward_is_an_error(loss: Callable[[FakeDDP], torch.Tensor]) -> None:
    ddp = finding(LendsALayer())
    with pytest.raises(RuntimeError, match=r"ready only once.*index [23] with name lent\."):
        loss(ddp).sum().backward()


def test_what_only_one_of_two_forwards_uses_is_used_in_forward() -> None:
    class Either(LendsALayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.body if x.sum() > 0 else self.lent)(x)

    ddp = finding(Either())
    (ddp(X).sum() + ddp(-X).sum()).backward()
    assert all(param.grad is not None for param in ddp.module.parameters())


def test_a_walk_finds_what_no_path_leads_to() -> None:
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    nodes = [get_gradient_edge(param).node for param in (used, unused)]
    assert out_of_reach_of([(used * 2).grad_fn], nodes) == [1]
    assert out_of_reach_of([], nodes) == [0, 1]


# ------------------------------------------------------------------ other ranks


def test_a_shadow_exchanges_marks_of_nothing() -> None:
    active, shadow = finding(Heads()), finding(Heads())
    active(X)[0].sum().backward()
    shadow(X, sync=False)[0].sum().backward()  # what it has accumulated does not count for the others
    shadow_backward(shadow.reducer)
    assert shadow.transport.calls == active.transport.calls
    assert shadow.reducer.usage_tracker.usage.sums.tolist() == [0] * 4


def test_marks_are_forgotten_when_the_ranks_change() -> None:
    ddp = finding(Heads())
    ddp(X, sync=False)[1].sum().backward()
    ddp.reducer.change_ranks(ddp.transport, ddp.reducer.reduce_strategy)
    ddp(X)[0].sum().backward()
    assert ddp.reducer.usage_tracker.usage.sums.tolist() == [2, 2, 0, 0]
