"""What the divisor asks of a device, and beside what. The means themselves: tests/features/test_mean.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from minddp.modes.divisor import Divisor
from tests.fakes import FakeTransport, FakeWork

CPU = torch.device("cpu")


def test_weights_travel_and_are_read_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """See [Note: read aside]."""
    entered = []

    @contextmanager
    def aside(self: Divisor, device: torch.device) -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    class Transport(FakeTransport):
        def all_reduce(self, tensor: torch.Tensor) -> FakeWork:
            entered.append("all-reduce")
            return FakeWork(lambda: entered.append("waited"))

    monkeypatch.setattr(Divisor, "_aside", aside)
    divisor = Divisor(Transport(), "mean")
    divisor.weigh(4.0, CPU)
    assert entered == ["in", "all-reduce", "out"]
    entered.clear()
    assert divisor.for_this_backward() == 1.0
    assert entered == ["in", "waited", "out"]


def test_on_a_gpu_aside_is_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(f"of {device}") or made[-1])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: f"on a stream {stream}")
    divisor = Divisor(FakeTransport(), "mean")
    for _ in range(2):
        assert divisor._aside(torch.device("cuda", 1)) == "on a stream of cuda:1"
    assert len(made) == 1, "each stream has memory of its own in torch's allocator"


def test_without_weights_the_device_is_asked_for_nothing() -> None:
    transport = FakeTransport(world_size=3)
    assert Divisor(transport, "mean").for_this_backward() == 3
    assert Divisor(transport, "sum").for_this_backward() is None
    assert not transport.calls
