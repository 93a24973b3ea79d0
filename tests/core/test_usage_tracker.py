"""The rule: each parameter gets its gradient once. Other rules: `test_find_unused.py`, `test_static_graph.py`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minddp.core.usage_tracker import UsageTracker
from tests.fakes import FakeDDP
from tests.modules import Heads


def test_every_hook_fires_once_and_no_parameter_is_unused() -> None:
    usage_tracker = UsageTracker([nn.Parameter(torch.ones(1)) for _ in range(3)])
    assert usage_tracker.last_unused is None
    assert usage_tracker.begin_pass() == [1, 1, 1]
    assert usage_tracker.last_unused == []
    assert usage_tracker.close() is None


def test_hooks_are_not_wrapped_and_nothing_is_exchanged() -> None:
    ddp = FakeDDP(Heads())
    usage_tracker = ddp.reducer.usage_tracker
    handler = [].append
    assert usage_tracker.wrap_hook(handler) is handler
    usage_tracker.all_launched(ddp.transport, leaves_outputs=False)
    usage_tracker.shadow(ddp.transport)
    assert ddp.transport.calls == []
    assert not usage_tracker.skipped_buckets(ddp.reducer.store.plan)


class Noting(UsageTracker):
    """The rule, and a note of each call."""

    def __init__(self, params: list[nn.Parameter]):
        super().__init__(params)
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name in {method for method in vars(UsageTracker) if not method.startswith("_")} - NO_CALLS:
            super().__getattribute__("calls").append(name)
        return super().__getattribute__(name)


NO_CALLS = {"is_static", "finds_unused", "is_recording", "order_is_provisional", "wrap_hook", "stays_local"}


@pytest.fixture
def noted() -> tuple[FakeDDP, list[str]]:
    ddp = FakeDDP(Heads())
    usage_tracker = Noting(ddp.reducer.params)
    ddp.reducer.expect(usage_tracker)
    return ddp, usage_tracker.calls


def test_the_reducer_calls_it_in_the_order_of_its_methods(noted: tuple[FakeDDP, list[str]]) -> None:
    ddp, calls = noted
    left, right = ddp(torch.ones(1, 2))
    (left + right).sum().backward()
    around = ["forward_begins", "post_forward", "backward_begins"]
    assert calls == [*around, "begin_pass", "skipped_buckets", "all_launched", "close"]


def test_it_notices_a_backward_that_reaches_no_parameter(noted: tuple[FakeDDP, list[str]]) -> None:
    ddp, calls = noted
    x = torch.ones(1, 2, requires_grad=True)
    torch.autograd.grad(ddp(x)[0].sum(), x)
    assert calls == ["forward_begins", "post_forward", "backward_begins", "backward_was_empty"]


def test_it_abandons_a_backward_that_an_exception_has_ended(noted: tuple[FakeDDP, list[str]]) -> None:
    ddp, calls = noted
    ddp.module.left.weight.register_hook(lambda _grad: 1 / 0)
    left, right = ddp(torch.ones(1, 2))
    with pytest.raises(ZeroDivisionError):
        (left + right).sum().backward()
    calls.clear()
    ddp.reducer.ensure_finished()
    assert calls == ["abandon", "forward_begins"]
