"""Marks of use: what is sent, what has to be read, and what a CUDA graph cannot capture."""

from __future__ import annotations

import pytest
import torch

from minddp.expectation.usage_map import UsageMap
from tests.fakes import FakeTransport

CPU = torch.device("cpu")


def exchanged(marked: list[int], has_grad: list[bool]) -> tuple[UsageMap, object]:
    usage = UsageMap(len(has_grad), CPU)
    for param in marked:
        usage.mark(param)
    usage.begin_exchange(FakeTransport(world_size=2), has_grad)
    return usage, usage.finish_exchange()


def test_who_used_them_all_has_nothing_to_read() -> None:
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
    usage, transport = UsageMap(3, CPU), FakeTransport()
    usage._device = torch.device("cuda")
    usage.mark(1)
    with pytest.raises(RuntimeError, match=r"CUDA graph captures.*left 2 of 3 parameters unused.*static_graph"):
        usage.begin_exchange(transport, [True] * 3)
    assert not transport.calls
