"""Real ranks on GPUs, as many on one card as a test needs. See "Several ranks on one card" in docs/gpu.md."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import RankPool

REHEARSAL = os.environ.get("MINDDP_GPU_REHEARSAL") == "1"
DEVICE = "cpu" if REHEARSAL else "cuda"


@dataclass(frozen=True)
class World:
    """`size` ranks whose process group has this backend."""

    backend: str
    size: int


WORLDS = {"nccl1": World("nccl", 1), "nccl2": World("nccl", 2), "gloo2": World("gloo", 2)}


def environment_of(rank: int, size: int) -> dict[str, str]:
    """The environment of a rank's process before NCCL is loaded into it."""
    steady = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_DEBUG": "WARN"}
    if torch.cuda.device_count() >= size:
        return steady
    apart = {"NCCL_HOSTID": f"minddp-rank-{rank}", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
    return steady | apart | {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def collectives(rank: int) -> list[Any]:
    """The collectives of DDP: a sum, a broadcast, an all-gather."""
    size = dist.get_world_size()
    total = torch.full((5,), rank + 1.0, device=DEVICE)
    dist.all_reduce(total)
    first = torch.full((2,), float(rank), device=DEVICE)
    dist.broadcast(first, 0)
    everyone = [torch.zeros(1, device=DEVICE) for _ in range(size)]
    dist.all_gather(everyone, torch.full((1,), float(rank), device=DEVICE))
    return [total.tolist(), first.tolist(), torch.cat(everyone).tolist()]


class GpuPool(RankPool):
    """A pool of ranks in one world, on as many cards as there are. `extra` is more environment."""

    def __init__(self, world: World, group_timeout_s: float = 60.0, grace_s: float = 15.0, **extra: str):
        super().__init__(world.size, group_timeout_s, grace_s)
        self.backend = "gloo" if REHEARSAL else world.backend
        self.prepare = partial(_take_a_card, world, extra)


def _take_a_card(world: World, extra: dict[str, str], rank: int) -> None:
    """The preparation of a rank before it joins its group."""
    from torch._inductor import config as inductor

    os.environ.update(environment_of(rank, world.size) | extra)
    torch.set_num_threads(1)
    inductor.compile_threads = 1  # the variable for it has been read before the fork
    if not REHEARSAL:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
