"""The transport over a process group in shared memory: that of the wrapper, or one beside it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from minddp.transport.backend import SharedMemoryGroup
from minddp.transport.process_group import ProcessGroupTransport, backend_for
from minddp.transport.protocols import Work
from minddp.transport.shared_memory.rendezvous import CannotConnect


def require_gloo(group: ProcessGroupTransport, device: torch.device) -> Any:
    """The group's gloo. Raises `CannotConnect` unless sums in shared memory have the same bits as the group's."""
    if device.type != "cpu":
        raise CannotConnect(f"the tensors are on {device}, not in the memory of the host")
    if type(group.group) is not dist.ProcessGroup:
        raise CannotConnect(f"{type(group.group).__name__} may have an all-reduce of its own")
    gloo = backend_for(group.group, device)
    if gloo is None or gloo.name() != "gloo":
        name = "no backend" if gloo is None else gloo.name()
        raise CannotConnect(f"on the CPU the group has {name}, not gloo, and may add in another order")
    return gloo


class SharedMemoryTransport(ProcessGroupTransport):
    """All collectives of `shared`; `group` is the group of the wrapper, which may be the same.

    Its threads end with `group`. Later calls use gloo, which may still work, as in torch.
    """

    waits_again = True

    def __init__(self, group: dist.ProcessGroup, shared: SharedMemoryGroup):
        super().__init__(group)
        self._shared = shared
        self.adds_after_s = shared.progress_delay_s
        self._group_end = None if group is shared else self.when_group_ends(shared.shutdown)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return super().allocate(numel, dtype, device)
        return self._shared.allocate(numel, dtype)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._shared.allreduce([tensor])

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self._shared.broadcast([tensor], source)
