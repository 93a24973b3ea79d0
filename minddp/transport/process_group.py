"""Transport over `torch.distributed`: whatever backend the process group has (gloo, NCCL, ...)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from minddp.transport.base import Work


class ProcessGroupTransport:
    """Calls the process group's own methods.

    `torch.distributed.all_reduce` and its siblings do the same after some twenty microseconds of checks and
    logging in Python, which a model with many buckets would pay many times in every step.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def world_size(self) -> int:
        return self.group.size()

    @property
    def store(self) -> dist.Store | None:
        _, store = dist.distributed_c10d._world.pg_map.get(self.group, (None, None))
        return store

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self.group.allreduce([tensor])

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self.group.broadcast(tensor, source)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self.group.allgather([gathered], [tensor]).wait()
        return gathered
