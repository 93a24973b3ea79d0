"""Who adds what, and in which order: arithmetic, and the few lines that carry it out.

[Note: the order of addition]
(a + b) + c and a + (b + c) round differently, so the order of addition is part of the result. Here it is gloo's, to
the bit, at any number of ranks. Gloo's ring all-reduce cuts a buffer into one chunk for each rank and sends
partial sums downwards, from rank to rank. The chunk that is to end at rank r starts at the rank below it and goes
all the way round:

    chunk r:   r-1  ->  r-2  ->  ...  ->  r+1  ->  r        (modulo the number of ranks)

At each stop the rank adds its own to what arrives, and half precision is rounded at every stop. A chunk is made of
at least two segments of at most 1 MiB, which is what `chunk_bounds` computes. With two ranks there is nothing to
choose; from three on, the order depends on where in the buffer an element lies.

Source: gloo/allreduce.cc, function `ring`, of github.com/facebookincubator/gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

LARGEST_SEGMENT_BYTES = 1024 * 1024  # gloo's kMaxSegmentSize
BLOCK_NUMEL = 32 * 1024  # torch adds up to so many elements in the calling thread, without waking others


def chunk_bounds(chunk: int, world_size: int, numel: int, itemsize: int) -> tuple[int, int]:
    """First and last-plus-one element of a chunk, in a buffer of `numel` elements of `itemsize` bytes.

    Chunks are of equal length, but for those at the end of the buffer, which may be shorter or empty.
    """
    nbytes = numel * itemsize
    num_segments = max(_quotient_up(nbytes, LARGEST_SEGMENT_BYTES), 2 * world_size)
    segments_per_chunk = _quotient_up(num_segments, world_size)
    segment_bytes = _quotient_up(nbytes, segments_per_chunk * world_size)
    chunk_numel = segments_per_chunk * _quotient_up(segment_bytes, itemsize)
    return min(chunk * chunk_numel, numel), min((chunk + 1) * chunk_numel, numel)


def route(chunk: int, world_size: int) -> list[int]:
    """The ranks in the order in which their addends join the sum; the last is the chunk's owner."""
    return [(chunk - step) % world_size for step in range(1, world_size + 1)]


def reduce_chunk(addends: Sequence[torch.Tensor], owner: int) -> None:
    """Replace all of `addends`, one flat tensor for each rank, by their sum. `owner` decides the order."""
    stops = route(owner, len(addends))
    for blocks in zip(*(addend.split(BLOCK_NUMEL) for addend in addends), strict=True):
        for arriving, here in pairwise(stops):
            blocks[here].add_(blocks[arriving])
        for rank in stops[:-1]:
            blocks[rank].copy_(blocks[owner])


def _quotient_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
