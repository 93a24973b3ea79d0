"""The plan of the buckets, and that messages are sent in its order, whatever becomes ready first."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from reference import oracle
from reference.bucketed import Bucketed, assign_buckets
from reference.interface import DataParallel, gradient
from tests.ranks import on_ranks


def params(*specs: tuple[int, torch.dtype]) -> dict[str, nn.Parameter]:
    """`p0`, `p1`, ... with the given numbers of elements and dtypes."""
    return {f"p{i}": nn.Parameter(torch.zeros(numel, dtype=dtype)) for i, (numel, dtype) in enumerate(specs)}


F32, F64 = torch.float32, torch.float64


@settings(deadline=None)
@given(
    specs=st.lists(st.tuples(st.integers(0, 20), st.sampled_from([F32, F64])), min_size=1, max_size=12),
    cap_bytes=st.integers(0, 200),
)
def test_a_plan_holds_every_parameter_once_backwards_and_closes_buckets_at_the_cap(specs, cap_bytes):
    trainable = params(*specs)
    buckets = assign_buckets(trainable, cap_bytes)

    def nbytes(names):
        return sum(trainable[name].nbytes for name in names)

    assert [name for bucket in buckets for name in bucket.names] == [*reversed([*trainable])]
    for index, bucket in enumerate(buckets):
        assert bucket.index == index
        assert len({trainable[name].dtype for name in bucket.names}) == 1
        assert len(bucket.names) == 1 or nbytes(bucket.names[:-1]) < cap_bytes
    for bucket, following in pairwise(buckets):
        changes_dtype = trainable[bucket.names[0]].dtype != trainable[following.names[0]].dtype
        assert changes_dtype or nbytes(bucket.names) >= cap_bytes


class InAnyOrder(nn.Module):
    """Three layers of one size, run in the order the caller asks for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False).double() for _ in range(3))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for i in order:
            x = self.layers[i](x).tanh()
        return x.square().mean()


AS_REGISTERED, BACKWARDS, SHUFFLED = [0, 1, 2], [2, 1, 0], [1, 2, 0]


@on_ranks(lambda orders: len(orders))
@pytest.mark.parametrize(
    "orders", [[AS_REGISTERED] * 2, [BACKWARDS] * 2, [SHUFFLED] * 2, [AS_REGISTERED, BACKWARDS, SHUFFLED]]
)
def test_launches_follow_the_plan_whatever_is_ready_first(rank: int, orders: list[list[int]]) -> None:
    """Rank r runs its layers in `orders[r]`."""
    x = [torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    of_rank = [
        oracle.gradients(InAnyOrder(), x[r], lambda m, examples: m(examples, orders[r]))
        for r in range(dist.get_world_size())
    ]
    ddp: DataParallel = Bucketed(InAnyOrder(), cap_bytes=0)
    ddp(x[rank], orders[rank]).backward()
    ddp.synchronize()
    expected = {name: oracle.mean([grads[name] for grads in of_rank]) for name in of_rank[0]}
    actual = {name: gradient(param) for name, param in ddp.trainable.items()}
    assert [message.label for message in ddp.wire.sent] == ["bucket 0", "bucket 1", "bucket 2"]
    assert oracle.largest_difference(actual, expected) <= (0 if len(orders) == 2 else 1e-15)
