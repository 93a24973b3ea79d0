"""How bytes travel. `open_transport` is the one place that knows which kinds there are."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from minddp.transport.hierarchical import HierarchicalTransport, connect_hosts
from minddp.transport.nccl import NcclTransport, connect_gpus
from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.protocols import Transport, Work
from minddp.transport.shared_memory import CannotConnect, SharedMemoryTransport, connect_ranks

__all__ = [
    "HierarchicalTransport",
    "NcclTransport",
    "ProcessGroupTransport",
    "SharedMemoryTransport",
    "Transport",
    "Work",
    "open_transport",
]

_log = logging.getLogger(__name__)


def open_transport(kind: str, group: dist.ProcessGroup, device: torch.device | None = None) -> Transport:
    """The transport named `kind` over `group`, for tensors on `device`, the CPU if `None`. Collective.

    "process_group" is the group's own backend. "shared_memory" is memory that the ranks of one host share, for
    tensors on the CPU; where that cannot be had it becomes the process group, with a warning that says why. "auto"
    is the same, but takes that for granted. "hierarchical" is shared memory within each host and one sum of each
    host between them, for tensors on the CPU and gloo; its bits are not the process group's where hosts have
    several ranks. See [Note: the order of addition between hosts]. "nccl" calls NCCL through CuPy, for tensors on
    an NVIDIA GPU, whatever the group's backend.

    Raises:
        ValueError: an unknown kind, or one that is not for such tensors or groups.
        RuntimeError: "nccl" cannot be had on some rank; says on which and why.
    """
    over_group = ProcessGroupTransport(group)
    if kind == "process_group":
        return over_group
    if kind in ("shared_memory", "hierarchical", "auto"):
        connect = connect_hosts if kind == "hierarchical" else connect_ranks
        try:
            return connect(over_group, device or torch.device("cpu"))
        except CannotConnect as obstacle:
            if group.rank() == 0:
                level = logging.INFO if kind == "auto" else logging.WARNING
                _log.log(level, "Gradients travel by the process group, not by shared memory: %s.", obstacle)
            return over_group
    if kind == "nccl":
        return connect_gpus(over_group, device or torch.device("cpu"))
    raise ValueError(
        f'Unknown transport {kind!r}; minddp has "process_group", "shared_memory", "hierarchical", "nccl" and '
        f'"auto".'
    )
