"""Memory that several processes have mapped, as tensors: a rank's own segments, and those of its peers.

A segment is an anonymous file in memory (memfd_create): it has no name in /dev/shm or elsewhere, and the size limit
of /dev/shm, 64 MiB in containers, does not apply. A rank sends its descriptor to a peer through a Unix socket; the
peer maps it and closes the descriptor. From then on only the mappings keep the memory alive, so the kernel frees it
when the last process that has mapped it ends, by whatever signal.

A tensor over a segment keeps it mapped: a bucket may be dropped while one of its gradients is still in use. With
the last tensor the segment is unmapped here, and a message with the next collective makes the peers unmap it.
"""

from __future__ import annotations

import mmap
import os

import torch

MIN_STAGING_BYTES = 64 * 1024


class Segment(mmap.mmap):
    """A mapping. `number` counts those of its owner. Unmapped once neither code nor a tensor refers to it."""

    number: int

    def tensor(self, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
        """A flat tensor in this segment, which it keeps mapped."""
        return torch.frombuffer(self, dtype=dtype, count=numel, offset=offset_bytes)


def create(nbytes: int) -> int:
    """The descriptor of new memory, all zero. It is reserved now, so that no later access can run out of memory.

    Raises:
        OSError: there is not enough memory.
    """
    descriptor = os.memfd_create("minddp", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def attach(descriptor: int, nbytes: int, number: int) -> Segment:
    """Map the memory of `descriptor`. The descriptor stays open."""
    segment = Segment(descriptor, nbytes, flags=mmap.MAP_SHARED)
    segment.number = number
    return segment


def staging_bytes(nbytes: int) -> int:
    """The size of a segment for a contribution of `nbytes`: one of few, so that segments are used again."""
    step = max(MIN_STAGING_BYTES, 1 << max(nbytes.bit_length() - 4, 0))  # at least 1/16 of it
    return -(-nbytes // step) * step
