"""The divisor of each backward. The means themselves: tests/features/test_mean.py."""

from __future__ import annotations

import pytest
import torch

from minddp.modes.divisor import Divisor
from tests.fakes import FakeTransport, FakeWork

CPU = torch.device("cpu")


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
    divisor.divide_by_active_ranks(count)
    divisor.divide_by_active_ranks(None)
    assert divisor.for_this_backward() == 4


def test_other_ranks_begin_without_weights() -> None:
    divisor = Divisor(FakeTransport(world_size=4))
    divisor.weigh(3.0, CPU)
    divisor.change_ranks(FakeTransport(world_size=5))
    assert divisor.for_this_backward() == 5
