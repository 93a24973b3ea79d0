"""Which rank adds what, and in which order: arithmetic, and the few lines that execute it.

[Note: the order of addition]
(a + b) + c and a + (b + c) round differently, so the order of addition is part of the result. Here it is gloo's, to
the bit, at any number of ranks. Gloo's ring all-reduce cuts a buffer into one chunk for each rank and sends partial
sums downwards, from rank to rank. The chunk that ends at rank r starts at the rank below it and goes round the
ring:

    chunk r:   r-1  ->  r-2  ->  ...  ->  r+1  ->  r        (modulo the number of ranks)

At each stop the rank adds its own addend to the partial sum, and half precision is rounded at every stop. A chunk
has at least two segments of at most 1 MiB, which `chunk_bounds` computes. With two ranks there is only one order;
from three on, the order depends on where in the buffer an element lies.

Source: gloo/allreduce.cc, function `ring`, of github.com/facebookincubator/gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from minddp.transport.protocols import AdditionOrder

MAX_SEGMENT_BYTES = 1024 * 1024  # gloo's kMaxSegmentSize
BLOCK_NUMEL = 32 * 1024  # torch adds up to so many elements in the calling thread, without waking others

Tensors = Sequence[torch.Tensor]


def chunk_bounds(chunk: int, world_size: int, numel: int, itemsize: int) -> tuple[int, int]:
    """First and last-plus-one element of a chunk, in a buffer of `numel` elements of `itemsize` bytes."""
    nbytes = numel * itemsize
    num_segments = max(_ceil_div(nbytes, MAX_SEGMENT_BYTES), 2 * world_size)
    segments_per_chunk = _ceil_div(num_segments, world_size)
    segment_bytes = _ceil_div(nbytes, segments_per_chunk * world_size)
    chunk_numel = segments_per_chunk * _ceil_div(segment_bytes, itemsize)
    return min(chunk * chunk_numel, numel), min((chunk + 1) * chunk_numel, numel)


def route(chunk: int, world_size: int) -> list[int]:
    """The ranks in the order in which their addends join the sum; the last is the chunk's owner."""
    return [(chunk - step) % world_size for step in range(1, world_size + 1)]


def all_reduce_chunk(addends: Tensors, owner: int, order: AdditionOrder | None = None) -> None:
    """Replace all of `addends`, one flat tensor for each rank, by their sum, in gloo's order or in `order`."""
    for blocks in in_blocks(addends):
        if order is None:
            reduce_to_owner(blocks, owner)
            copy_from_owner(blocks, owner)
        else:
            copy_from_owner(blocks, reduce_in_order(blocks, order))


def in_blocks(tensors: Tensors) -> Iterator[Tensors]:
    """Flat tensors of one length, block by block."""
    return zip(*(tensor.split(BLOCK_NUMEL) for tensor in tensors), strict=True)


def reduce_to_owner(blocks: Tensors, owner: int) -> None:
    """Replace the owner's block by the sum of all; the others are undefined afterwards."""
    for arriving, here in pairwise(route(owner, len(blocks))):
        blocks[here].add_(blocks[arriving])


def reduce_in_order(blocks: Tensors, order: AdditionOrder) -> int:
    """Returns the number of the block that is the sum; the others are undefined afterwards."""
    target = 0
    for target, source in order.steps:
        blocks[target].add_(blocks[source])
    blocks[target].mul_(order.factor)
    return target


def copy_from_owner(blocks: Tensors, owner: int) -> None:
    """Replace all blocks by the owner's."""
    for block in (*blocks[:owner], *blocks[owner + 1 :]):
        block.copy_(blocks[owner])


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
