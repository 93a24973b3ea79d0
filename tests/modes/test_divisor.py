"""What the divisor runs on a device, and on which stream. The means themselves: tests/features/test_mean.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from minddp.modes.divisor import Divisor
from minddp.platform import streams
from tests.fakes import FakeTransport, FakeWork

CPU = torch.device("cpu")


def test_weights_are_summed_and_read_on_the_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them on the current stream would wait for a whole forward."""
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

    monkeypatch.setattr(Divisor, "_on_side_stream", aside)
    divisor = Divisor(Transport())
    divisor.weigh(4.0, CPU)
    assert entered == ["in", "all-reduce", "out"]
    entered.clear()
    assert divisor.for_this_backward() == 1.0
    assert entered == ["in", "waited", "out"]


def test_on_a_gpu_aside_is_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    module = SimpleNamespace(
        Stream=lambda device: made.append(f"of {device}") or made[-1], stream=lambda stream: f"on a stream {stream}"
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    monkeypatch.setattr(streams, "has_streams", lambda _device: True)
    divisor = Divisor(FakeTransport())
    for _ in range(2):
        assert divisor._on_side_stream(torch.device("cuda", 1)) == "on a stream of cuda:1"
    assert len(made) == 1, "each stream has memory of its own in torch's allocator"


def test_without_weights_nothing_is_communicated() -> None:
    transport = FakeTransport(world_size=3)
    assert Divisor(transport).for_this_backward() == 3
    assert not transport.calls


def test_a_weight_counts_against_the_sum_of_all_and_for_one_backward() -> None:
    divisor = Divisor(FakeTransport(world_size=4))  # whose ranks all have the same weight
    for weight, expected in ((5.0, 4.0), (0.5, 4.0)):
        divisor.weigh(weight, CPU)
        assert divisor.for_this_backward() == expected
        assert divisor.for_this_backward() == 4, "the weight is forgotten"


def test_a_rank_of_weight_zero_divides_by_infinity() -> None:
    class OthersWeighOne(FakeTransport):
        def all_reduce(self, tensor: torch.Tensor) -> FakeWork:
            return FakeWork(lambda: tensor.add_(1))

    divisor = Divisor(OthersWeighOne())
    divisor.weigh(0.0, CPU)
    assert divisor.for_this_backward() == float("inf")
    divisor.weigh(4.0, CPU)
    assert [divisor.for_this_backward() for _ in range(2)] == [5 / 4, 2]


def test_weights_cannot_all_be_zero() -> None:
    divisor = Divisor(FakeTransport())
    divisor.weigh(0.0, CPU)
    with pytest.raises(RuntimeError, match="the weight 0"):
        divisor.for_this_backward()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_a_finite_number_of_samples(weight: float) -> None:
    with pytest.raises(ValueError, match="finite number, 0 or more"):
        Divisor(FakeTransport()).weigh(weight, CPU)


def test_under_join_the_active_ranks_count_for_one_backward() -> None:
    count: torch.futures.Future = torch.futures.Future()
    count.set_result([torch.tensor(2.0)])
    divisor = Divisor(FakeTransport(world_size=4))
    divisor.divide_by_active_ranks(count)
    assert [divisor.for_this_backward() for _ in range(2)] == [2, 4]


def test_other_ranks_begin_without_weights() -> None:
    divisor = Divisor(FakeTransport(world_size=4))
    divisor.weigh(3.0, CPU)
    divisor.change_ranks(FakeTransport(world_size=5))
    assert divisor.for_this_backward() == 5
