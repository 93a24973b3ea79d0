"""Results of communication hooks in memory of another order than the bucket's, by two real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from minddp import DistributedDataParallel
from tests.ranks import on_ranks

RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda average: average.clone(),
    "column": lambda average: torch.stack([average, -average], 1)[:, 0],
    "negated view": lambda average: torch._neg_view(-average),
}


def gradients(rank: int, result: str | None, turns: bool) -> list[Tensor]:
    """After three steps, before the last of which the module `turns` channels-last."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))

    def hook(_state, bucket):  # torch reads annotations, but not as text
        average = bucket.buffer() / 2
        dist.all_reduce(average)
        future: Future[Tensor] = Future()
        future.set_result(RESULTS[str(result)](average))
        return future

    if result is not None:
        ddp.register_comm_hook(None, hook)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        if turns and step == 2:
            ddp.to(memory_format=torch.channels_last)
        ddp.zero_grad()
        ddp(x).square().sum().backward()
    return [param.grad.clone() for param in ddp.parameters() if param.grad is not None]


@on_ranks(2)
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("result", RESULTS)
def test_the_values_count_and_not_the_memory(rank: int, result: str, turns: bool) -> None:
    ours, expected = (gradients(rank, which, turns) for which in (result, None))
    assert len(ours) == len(expected) == 4
    assert all(map(torch.equal, ours, expected))
