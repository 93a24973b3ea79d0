"""Collectives among ranks: the protocols `Transport` and `Work`, and a function that opens a transport by name."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from minddp.transport.protocols import Transport, Work

__all__ = ["Transport", "Work", "open_transport"]

_log = logging.getLogger(__name__)
KINDS = ("process_group", "shared_memory", "auto", "hierarchical", "nccl")


def open_transport(kind: str, group: dist.ProcessGroup, device: torch.device | None = None) -> Transport:
    """The transport named `kind` over `group`, for tensors on `device`, by default the CPU. Collective.

    "process_group": the group's own backend.
    "shared_memory": memory that the ranks of one host share, for tensors on the CPU. Ranks that cannot share memory
        use the process group; a warning gives the reason.
    "auto": as "shared_memory", but the reason is logged at level INFO.
    "hierarchical": shared memory within each host and one sum per host between them, for tensors on the CPU and
        gloo. The bits differ from the process group's where hosts have several ranks: see [Note: the order of
        addition between hosts].
    "nccl": NCCL called through CuPy, for tensors on an NVIDIA GPU, with any backend of the group.

    Raises:
        ValueError: an unknown kind, or one that does not support the device or the group.
        RuntimeError: "nccl" cannot be used on some rank. Names the rank and the reason.
    """
    if kind not in KINDS:
        raise ValueError(f"Unknown transport {kind!r}; minddp has {', '.join(KINDS)}.")

    # Imported here so that the protocols can be imported without any adapter
    from minddp.transport.backend import SharedMemoryGroup, connect_group
    from minddp.transport.process_group import ProcessGroupTransport
    from minddp.transport.shared_memory.shared_memory_transport import SharedMemoryTransport, require_gloo

    over_group, device = ProcessGroupTransport(group), device or torch.device("cpu")
    if isinstance(group, SharedMemoryGroup) and kind != "nccl" and device.type == "cpu":
        return SharedMemoryTransport(group, group)
    if kind == "process_group":
        return over_group
    if kind == "nccl":
        from minddp.transport.nccl import connect_gpus

        return connect_gpus(over_group, device)
    from minddp.transport.shared_memory.rendezvous import CannotConnect

    if kind == "hierarchical":
        try:
            require_gloo(over_group, device)
        except CannotConnect as reason:
            raise ValueError(
                f'transport="hierarchical" adds on the CPU, and by gloo between hosts, but {reason}. Pass '
                f'transport="process_group".'
            ) from None
    try:
        gloo = require_gloo(over_group, device)
        shared = connect_group(over_group.group_store, gloo, across_hosts=kind == "hierarchical")
        return SharedMemoryTransport(group, shared)
    except CannotConnect as reason:
        if group.rank() == 0:
            level = logging.INFO if kind == "auto" else logging.WARNING
            _log.log(level, "Gradients are reduced by the process group, not in shared memory: %s.", reason)
        return over_group
