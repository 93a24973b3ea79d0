"""First of all: do the worlds come up? When one does not, all that uses it fails for that reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.ranks import DEVICE, WORLDS, GpuPool


def collectives(rank: int) -> list[Any]:
    """What DDP needs of a group: a sum, a broadcast, an all-gather."""
    size = dist.get_world_size()
    total = torch.full((5,), rank + 1.0, device=DEVICE)
    dist.all_reduce(total)
    first = torch.full((2,), float(rank), device=DEVICE)
    dist.broadcast(first, 0)
    everyone = [torch.zeros(1, device=DEVICE) for _ in range(size)]
    dist.all_gather(everyone, torch.full((1,), float(rank), device=DEVICE))
    return [total.tolist(), first.tolist(), torch.cat(everyone).tolist()]


@pytest.mark.parametrize("world", WORLDS)
def test_a_world_comes_up(world: str, gpu_ranks: Callable[[str], GpuPool]) -> None:
    size = WORLDS[world].size
    expected = [[size * (size + 1) / 2] * 5, [0.0, 0.0], [float(rank) for rank in range(size)]]
    assert gpu_ranks(world).run(collectives, timeout_s=100) == [expected] * size
