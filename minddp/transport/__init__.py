"""How bytes travel. `open_transport` is the one place that knows which kinds there are."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from minddp.transport.base import Transport, Work
from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.shared_memory import CannotConnect, SharedMemoryTransport, connect_ranks

__all__ = ["ProcessGroupTransport", "SharedMemoryTransport", "Transport", "Work", "open_transport"]

_log = logging.getLogger(__name__)


def open_transport(kind: str, group: dist.ProcessGroup, device: torch.device | None = None) -> Transport:
    """The transport named `kind` over `group`, for tensors on `device`, the CPU if `None`. Collective.

    "process_group" is the group's own backend. "shared_memory" is memory that the ranks of one host share, for
    tensors on the CPU; where that cannot be had it becomes the process group, with a warning that says why. "auto"
    is the same, but takes that for granted.

    Raises:
        NotImplementedError: a kind that is planned but does not work yet.
        ValueError: an unknown kind.
    """
    over_group = ProcessGroupTransport(group)
    if kind == "process_group":
        return over_group
    if kind in ("shared_memory", "auto"):
        try:
            return connect_ranks(over_group, device or torch.device("cpu"))
        except CannotConnect as obstacle:
            if group.rank() == 0:
                level = logging.WARNING if kind == "shared_memory" else logging.INFO
                _log.log(level, "Gradients travel by the process group, not by shared memory: %s.", obstacle)
            return over_group
    if kind == "nccl":
        raise NotImplementedError(f'transport="{kind}" does not work yet; pass transport="process_group".')
    raise ValueError(f'Unknown transport {kind!r}; minddp has "process_group", "shared_memory" and "auto".')
