"""Memory that several processes have mapped, as tensors.

[Note: memory without a name]
A segment is an anonymous file in memory (memfd_create): it has no name in /dev/shm or anywhere else, and is not
subject to the size of /dev/shm, which in containers is 64 MiB. A peer is sent its descriptor through a Unix socket,
maps it, and closes the descriptor. From then on only the mappings keep the memory alive, so that the kernel frees
it when the last process that has mapped it ends, by whatever signal.

While the processes live, reference counts do the rest. A tensor over a segment keeps it mapped, as any tensor
keeps its memory: a bucket may be dropped while somebody still holds one of its gradients. When the last tensor is
gone the segment is unmapped here, and the peers are told to do likewise.
"""

from __future__ import annotations

import mmap
import os
import sys

import torch


class Segment(mmap.mmap):
    """A mapping; `number` is what its owner calls it. Unmapped when nobody, tensors included, refers to it."""

    number: int = -1

    @property
    def address(self) -> int:
        return tensor_over(self, torch.uint8, 1).data_ptr()


def is_supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def create(nbytes: int) -> int:
    """The descriptor of fresh memory, all zero. The room is taken now, so that nobody runs out of it later.

    Raises:
        OSError: there is no room.
    """
    descriptor = os.memfd_create("minddp", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def attach(descriptor: int, nbytes: int, number: int = -1) -> Segment:
    """Map the memory behind `descriptor`, which is closed."""
    try:
        segment = Segment(descriptor, nbytes, flags=mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    segment.number = number
    return segment


def tensor_over(segment: Segment, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
    """A flat tensor that lies in `segment`, and keeps it."""
    return torch.frombuffer(segment, dtype=dtype, count=numel, offset=offset_bytes)
