"""Marks of use: what is sent, what has to be read, and what a CUDA graph cannot capture."""

from __future__ import annotations

import pytest
import torch

from minddp.core.usage_map import UsageMap
from tests.fakes import FakeTransport


def exchanged(marked: list[int], has_grad: list[bool]) -> tuple[UsageMap, object]:
    usage = usage_of(marked, has_grad)
    usage.begin_exchange(FakeTransport(world_size=2))
    return usage, usage.finish_exchange()


def usage_of(marked: list[int], has_grad: list[bool]) -> UsageMap:
    """Hooks have fired for `marked`; when the marks are sent, parameters have a gradient as `has_grad` says."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in has_grad]
    usage = UsageMap(params)
    for param in marked:
        params[param].grad = torch.zeros(1)
        usage.marking(lambda _: None)(param)
    for param, has in zip(params, has_grad, strict=True):
        param.grad = torch.zeros(1) if has else None
    return usage


def test_a_gradient_that_is_undefined_is_not_marked() -> None:
    usage = UsageMap([torch.nn.Parameter(torch.zeros(1))])
    handled: list[int] = []
    usage.marking(handled.append)(0)
    usage.begin_exchange(FakeTransport(world_size=2))
    assert (handled, usage.finish_exchange()) == ([0], [True])


def test_a_rank_that_used_them_all_has_nothing_to_read() -> None:
    usage, unused = exchanged([0, 1, 2], [True] * 3)
    assert usage.sums.tolist() == [2, 2, 2]
    assert usage.sums.dtype is torch.int32
    assert unused is None


def test_a_mark_without_a_gradient_does_not_count() -> None:
    usage, unused = exchanged([0, 2], [True, True, False])
    assert usage.sums.tolist() == [2, 0, 0]
    assert unused == [False, True, True]


def test_a_graph_cannot_capture_a_step_with_unused_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    usage, transport = usage_of([1], [True] * 3), FakeTransport()
    usage._device = torch.device("cuda")
    with pytest.raises(RuntimeError, match=r"CUDA graph captures.*left 2 of 3 parameters unused.*static_graph"):
        usage.begin_exchange(transport)
    assert not transport.calls
