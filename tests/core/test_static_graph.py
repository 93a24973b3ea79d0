"""`static_graph`: the first backward is recorded, all others are like it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minddp.core.backward_pass import Phase
from minddp.core.events import EventKind
from minddp.modes.join import shadow_backward
from tests.fakes import FakeDDP, FakeTransport
from tests.logs import must_log
from tests.modules import Checkpointed, Heads, HidesItsOutput, Scales, SharedByCheckpoints

LAUNCHED = EventKind.BUCKET_LAUNCHED
ONE_EACH = [0]
X = torch.ones(1, 2)


def static(module: nn.Module, transport: FakeTransport | None = None, **options: Any) -> FakeDDP:
    return FakeDDP(module, transport, static_graph=True, **options)


def test_a_layer_in_two_checkpoints_is_reduced_once_and_right() -> None:
    module = SharedByCheckpoints()
    ddp = static(module)
    expected = torch.autograd.grad(module.layer(module.layer(X)).sum(), list(module.parameters()))
    for _ in range(3):
        module.zero_grad()
        ddp.step(X.clone())
        assert ddp.reducer.phase is Phase.IDLE
        assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))
    assert ddp.transport.count("all_reduce") == 4  # three backwards, and the exchange of usage
    assert ddp.reducer.usage_tracker.begin_pass() == [2, 2]


def test_the_end_of_a_nested_backward_does_not_end_the_recording() -> None:
    """Nothing shows in the output, so the first hook fires in the nested backward."""
    ddp = static(HidesItsOutput(Checkpointed()))
    for _ in range(3):
        ddp(X).tensor.sum().backward()
        assert ddp.reducer.phase is Phase.IDLE
    assert ddp.reducer.usage_tracker.begin_pass() == [1, 1, 1, 1]


def test_nothing_is_launched_before_the_end_of_the_first_backward() -> None:
    ddp = static(Scales([0, 1]), bucket_cap_mb_list=ONE_EACH)
    launched_early: list[str] = []
    ddp.module.scales[0].register_post_accumulate_grad_hook(
        lambda _param: launched_early.extend(ddp.take_events(LAUNCHED))
    )
    ddp.step(X)
    assert launched_early == []
    ddp.take_events()
    ddp.step(X)
    assert launched_early == ["bucket launched: 0"]


def test_the_order_of_the_second_backward_decides_the_rebuild() -> None:
    """In the first one, parameters are ready in the order of their numbers."""
    ddp = static(Scales([2, 0, 1]), bucket_cap_mb_list=ONE_EACH)
    plans = []
    for _ in range(4):
        ddp.step(X)
        plans.append([ddp.reducer.store.plan.names(bucket)[0][-1] for bucket in range(3)])
    by_registration, by_readiness = ["2", "1", "0"], ["1", "0", "2"]
    assert plans == [by_registration] * 2 + [by_readiness] * 2
    assert ddp.transport.count("broadcast from 0") == 1


def test_a_first_backward_that_does_not_come_in_at_the_outputs_is_part_of_the_recording() -> None:
    """One of a penalty on a weight, which the loss's backward follows."""
    ddp = static(Scales([0, 1]))
    for _ in range(3):
        output = ddp(X)
        ddp.module.scales[0].square().backward()
        assert ddp.reducer.phase is Phase.INCOMPLETE
        output.sum().backward()
        assert ddp.reducer.phase is Phase.IDLE
    assert ddp.reducer.usage_tracker.begin_pass() == [2, 1]


# ------------------------------------------------------------------ unused parameters


def test_a_parameter_that_no_rank_has_used_keeps_its_gradient() -> None:
    ddp = static(Heads())
    before = ddp.module.right.weight.grad = torch.full((2, 2), 5.0)
    for _ in range(4):
        ddp(X)[0].sum().backward()
        assert ddp.reducer.phase is Phase.IDLE
        assert ddp.module.right.weight.grad is before
        assert ddp.module.right.bias.grad is None
    assert torch.equal(before, torch.full((2, 2), 5.0))


def test_one_that_only_other_ranks_have_used_gets_the_average() -> None:
    class UsesAll(FakeTransport):
        def all_reduce(self, tensor: torch.Tensor) -> Any:
            if tensor.dtype is torch.int32:
                tensor.add_(1)
            return super().all_reduce(tensor)

    ddp = static(Heads(), UsesAll())
    for _ in range(3):
        ddp(X)[0].sum().backward()
        assert ddp.module.right.bias.grad.tolist() == [0, 0]
        assert ddp.reducer.usage_tracker.last_unused == [2, 3]


def test_marks_are_exchanged_once() -> None:
    ddp = static(Heads())
    for _ in range(3):
        ddp(X)[0].sum().backward()
    assert ddp.transport.count("all_reduce") == 4
    assert not ddp.reducer.usage_tracker.order_is_provisional


@pytest.mark.parametrize("skips", [False, True])
def test_buckets_of_unused_parameters_are_reduced_unless_asked_otherwise(skips: bool) -> None:
    ddp = static(
        Heads(), find_unused_parameters=True, skip_all_reduce_unused_params=skips, bucket_cap_mb_list=ONE_EACH
    )
    for backward in range(3):
        ddp.take_events()
        ddp(X)[0].sum().backward()
        assert len(ddp.take_events(LAUNCHED)) == (2 if skips and backward else 4)  # as torch, all of the first one


# ------------------------------------------------------------------ a graph that changes


def test_a_parameter_that_was_left_out_and_is_used_is_an_error() -> None:
    ddp = static(Heads())
    for _ in range(2):
        ddp(X)[0].sum().backward()
    with pytest.raises(RuntimeError, match=r"graph has changed in this iteration.*`right\."):
        ddp(X)[1].sum().backward()


def test_a_parameter_that_was_used_and_is_left_out_is_an_error() -> None:
    ddp = static(Heads())
    for _ in range(2):
        left, right = ddp(X)
        (left + right).sum().backward()
    with must_log("has produced no gradient"):
        ddp(X)[0].sum().backward()
    with pytest.raises(RuntimeError, match=r"graph has changed in this iteration(.|\n)*right\.weight"):
        ddp(X)


# ------------------------------------------------------------------ exceptions and other ranks


def test_an_interrupted_first_backward_is_recorded_again() -> None:
    ddp = static(Scales([0, 1], explode_after=0))
    ddp.fail(X)
    for step in range(3):
        ddp.step(X)
        assert ddp.transport.count("all_reduce") == step + 2
        assert ddp.reducer.phase is Phase.IDLE
    assert ddp.reducer.usage_tracker.begin_pass() == [1, 1]


def test_an_interrupted_second_backward_keeps_what_is_recorded() -> None:
    ddp = static(Scales([0, 1], explode_after=0))
    for fails in (False, True, False, False):
        ddp.module.explosive.arm(fails)
        if fails:
            with pytest.raises(KeyError):
                ddp.step(X)
        else:
            ddp.step(X)
    assert ddp.transport.count("all_reduce") == 4
    assert ddp.reducer.phase is Phase.IDLE


def test_a_rank_that_shadows_the_first_backward_exchanges_marks_and_records_later() -> None:
    active, shadow = (static(Scales([1, 0]), bucket_cap_mb_list=ONE_EACH) for _ in range(2))
    for _ in range(3):
        active.step(X)
        shadow.reducer.rebuild_if_due()
        shadow_backward(shadow.reducer)
    assert shadow.transport.calls == active.transport.calls
    shadow.step(X)
    assert shadow.reducer.usage_tracker.begin_pass() == [1, 1]


def test_marks_are_forgotten_when_the_ranks_change() -> None:
    ddp = static(Heads())
    ddp(X, sync=False)[1].sum().backward()
    ddp.reducer.change_ranks(ddp.transport, ddp.reducer.reduce_strategy)
    ddp(X)[0].sum().backward()
    assert ddp.reducer.usage_tracker._globally_unused == [False, False, True, True]


def test_hooks_of_an_unfinished_recording_are_not_counted_when_the_ranks_change() -> None:
    ddp = static(Scales([0, 1]))
    ddp(X)
    ddp.module.scales[0].square().backward()
    ddp.reducer.change_ranks(ddp.transport, ddp.reducer.reduce_strategy)
    for _ in range(2):
        ddp.step(X)
    assert ddp.reducer.usage_tracker.begin_pass() == [1, 1]


def test_a_recorded_first_backward_may_be_reduced_by_its_caller() -> None:
    """Before backward is over, once all gradients have come. A second call does nothing."""
    ddp = static(Scales([0, 1]))
    seen: list[int] = []

    def reduce(_grad: torch.Tensor) -> None:
        ddp.reducer.reduce_recorded()
        ddp.reducer.reduce_recorded()
        seen.append(ddp.transport.count("all_reduce"))

    x = X.clone().requires_grad_()
    x.register_hook(reduce)
    ddp(x.exp()).sum().backward()
    assert seen == [2]
    assert ddp.reducer.phase is Phase.IDLE
