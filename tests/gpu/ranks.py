"""Real ranks on GPUs, as many on one card as a test wants. See [Note: two ranks on one card] in `meeting.py`."""

from __future__ import annotations

import datetime
import os
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import _CONTEXT, RankPool

REHEARSAL = os.environ.get("MINDDP_GPU_REHEARSAL") == "1"
DEVICE = "cpu" if REHEARSAL else "cuda"


@dataclass(frozen=True)
class World:
    """`size` ranks whose process group has this backend."""

    backend: str
    size: int


WORLDS = {"nccl1": World("nccl", 1), "nccl2": World("nccl", 2), "gloo2": World("gloo", 2)}
#: Worlds that did not come up in an earlier part of `make gpu`: nobody waits for them again.
KNOWN_TO_BE_DOWN = tuple(os.environ.get("MINDDP_GPU_WORLDS_DOWN", "").split())


def environment_of(rank: int, size: int) -> dict[str, str]:
    """What a rank's process needs to find before NCCL is loaded into it."""
    steady = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_DEBUG": "WARN", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if torch.cuda.device_count() >= size:
        return steady
    apart = {"NCCL_HOSTID": f"minddp-rank-{rank}", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
    return steady | apart | {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


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


class GpuPool(RankPool):
    """A pool of ranks in one world, on as many cards as there are. `extra` is more environment."""

    def __init__(self, world: World, group_timeout_s: float = 60.0, grace_s: float = 15.0, **extra: str):
        super().__init__(world.size, group_timeout_s, grace_s)
        self.world = world
        self.extra = extra

    def _start(self) -> None:
        rendezvous = os.path.join(tempfile.mkdtemp(prefix="minddp-gpu-"), "store")
        for rank in range(self.world_size):
            ours, theirs = _CONTEXT.Pipe()
            environment = environment_of(rank, self.world_size) | self.extra
            process = _CONTEXT.Process(
                target=_serve,
                args=(rank, self.world, rendezvous, self.group_timeout_s, theirs, environment),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(
    rank: int, world: World, rendezvous: str, timeout_s: float, pipe: Connection, environment: dict[str, str]
) -> None:
    """Body of a worker: take a card, join the group, then run what arrives until the pipe closes."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    if not REHEARSAL:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group(
        "gloo" if REHEARSAL else world.backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(("ok", fn(rank, *args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
