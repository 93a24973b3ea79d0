"""The divisor of each backward. The means themselves: tests/features/test_mean.py."""

from __future__ import annotations

import torch

from minddp.modes.divisor import Divisor
from tests.fakes import FakeTransport


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
    divisor.weigh(3.0, torch.device("cpu"))
    divisor.change_ranks(FakeTransport(world_size=5))
    assert divisor.for_this_backward() == 5
