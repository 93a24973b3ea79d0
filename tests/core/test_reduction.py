"""Which collectives a bucket's reduction is, and where the division lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minddp.core.packing import Scaling
from minddp.core.reduction import AllReduceStrategy
from tests.buckets import bucket_of, pack, parameter
from tests.fakes import FakeTransport

WORLD = 4


def reduce_strategy(divisor: float | None, *, resident: bool = False) -> AllReduceStrategy:
    return AllReduceStrategy(FakeTransport(WORLD), lambda: divisor, Scaling(divide_resident=resident))


@pytest.mark.parametrize("resident", [False, True])
def test_each_rank_divides_before_the_sum(resident: bool) -> None:
    assert reduce_strategy(3, resident=resident).begin_pass() == Scaling(3, divide_resident=resident)


def test_a_bucket_is_summed_where_it_lies_once_it_is_waited_for() -> None:
    bucket = bucket_of([parameter(torch.ones(3))])
    strategy = reduce_strategy(WORLD)
    pack(bucket, strategy.begin_pass())
    before = bucket.comm_buffer.clone()
    reduction = strategy.launch(bucket, bucket.comm_buffer, is_last=True)
    assert torch.equal(bucket.comm_buffer, before)
    for _ in range(2):
        assert reduction.result() is bucket.comm_buffer
        assert torch.equal(bucket.comm_buffer, before * WORLD)


def test_other_contents_leave_the_bucket_alone() -> None:
    """A rank that has run out of inputs contributes zeros."""
    bucket = bucket_of([parameter(torch.ones(3))])
    bucket.comm_buffer.fill_(7)
    for strategy in (reduce_strategy(2), AllReduceStrategy(FakeTransport(WORLD), lambda: 2, divides_after=True)):
        strategy.begin_pass()
        assert strategy.launch(bucket, torch.zeros(3), is_last=True).result().tolist() == [0, 0, 0]
        assert bucket.comm_buffer.tolist() == [7, 7, 7]


def test_a_sum_is_divided_afterwards_by_the_divisor_of_its_backward() -> None:
    divisors = iter([8.0, 2.0])
    strategy = AllReduceStrategy(FakeTransport(WORLD), lambda: next(divisors), divides_after=True)
    for expected in (0.5, 2.0):
        bucket = bucket_of([parameter(torch.ones(3))])
        bucket.params[0].grad.fill_(1)
        assert strategy.begin_pass() == Scaling()
        pack(bucket, Scaling())
        assert strategy.launch(bucket, bucket.comm_buffer, is_last=True).result().tolist() == [expected] * 3


def test_a_completion_is_reported_where_the_work_has_a_future() -> None:
    class WithFuture(FakeTransport):
        def all_reduce(self, tensor: torch.Tensor) -> Any:
            work = super().all_reduce(tensor)
            work.get_future = lambda: future
            return work

    future: torch.futures.Future = torch.futures.Future()
    called: list[str] = []
    complete: Callable[[], object] = lambda: called.append("complete")  # noqa: E731
    bucket = bucket_of([parameter(torch.ones(3))])
    reduce_strategy(2).launch(bucket, bucket.comm_buffer, is_last=True).when_complete(complete)
    strategy = AllReduceStrategy(WithFuture(), lambda: 2)
    strategy.launch(bucket, bucket.comm_buffer, is_last=True).when_complete(complete)
    assert called == []
    future.set_result(None)
    assert called == ["complete"]
