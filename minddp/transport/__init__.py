"""How bytes travel. `open_transport` is the one place that knows which kinds there are."""

from __future__ import annotations

import torch.distributed as dist

from minddp.transport.base import Transport, Work
from minddp.transport.process_group import ProcessGroupTransport

__all__ = ["ProcessGroupTransport", "Transport", "Work", "open_transport"]

_PLANNED = ("auto", "shared_memory", "nccl")


def open_transport(kind: str, group: dist.ProcessGroup) -> Transport:
    """The transport named `kind` over `group`.

    Raises:
        NotImplementedError: a kind that is planned but does not work yet.
        ValueError: an unknown kind.
    """
    if kind == "process_group":
        return ProcessGroupTransport(group)
    if kind in _PLANNED:
        raise NotImplementedError(f'transport="{kind}" does not work yet; pass transport="process_group".')
    raise ValueError(f'Unknown transport {kind!r}; minddp has "process_group".')
