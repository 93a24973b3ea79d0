"""The order in which the ranks' tensors are added, and the additions themselves.

(a + b) + c and a + (b + c) round differently, so the order of addition is part of the result. Here it is gloo's, to
the bit, for any number of ranks. Gloo's ring all-reduce cuts a buffer into one chunk per rank and sends partial
sums downwards, from rank to rank. The sum of chunk r starts at the rank below r and goes round the ring:

    chunk r:   r-1  ->  r-2  ->  ...  ->  r+1  ->  r        (modulo the number of ranks)

At each stop the rank adds its own addend to the partial sum, and half precision is rounded at every stop. A chunk
has at least two segments of at most 1 MiB, which `chunk_bounds` computes. With two ranks there is only one order;
from three on, the order depends on the position of an element in the buffer.

Source: gloo/allreduce.cc, function `ring`, of github.com/facebookincubator/gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

MAX_SEGMENT_BYTES = 1024 * 1024  # gloo's kMaxSegmentSize
BLOCK_NUMEL = 32 * 1024  # torch adds up to so many elements in the calling thread, without waking others

Tensors = Sequence[torch.Tensor]
#: In each step (target, source) the addend of rank `source` is added to that of rank `target`.
AdditionOrder = Sequence[tuple[int, int]]


@functools.lru_cache(maxsize=4096)
def chunk_bounds(chunk: int, world_size: int, numel: int, itemsize: int) -> tuple[int, int]:
    """First and last-plus-one element of a chunk, in a buffer of `numel` elements of `itemsize` bytes."""
    nbytes = numel * itemsize
    num_segments = max(_ceil_div(nbytes, MAX_SEGMENT_BYTES), 2 * world_size)
    segments_per_chunk = _ceil_div(num_segments, world_size)
    segment_bytes = _ceil_div(nbytes, segments_per_chunk * world_size)
    chunk_numel = segments_per_chunk * _ceil_div(segment_bytes, itemsize)
    return min(chunk * chunk_numel, numel), min((chunk + 1) * chunk_numel, numel)


def ring_order(chunk: int, world_size: int) -> AdditionOrder:
    """Gloo's order for a chunk. The last target is the rank `chunk`, which owns it."""
    ring = [(chunk - step) % world_size for step in range(1, world_size + 1)]
    return [(target, source) for source, target in pairwise(ring)]


def pieces(
    world_size: int, numel: int, itemsize: int, first: int, last: int
) -> Iterator[tuple[int, int, AdditionOrder]]:
    """The elements from `first` to `last` in pieces that are added in one order: start, stop and the order."""
    if world_size == 2:  # a + b is b + a
        yield first, last, ring_order(1, 2)
        return
    for chunk in range(world_size):
        start, stop = chunk_bounds(chunk, world_size, numel, itemsize)
        start, stop = max(start, first), min(stop, last)
        if start < stop:
            yield start, stop, ring_order(chunk, world_size)


def all_reduce_chunk(addends: Tensors, chunk: int) -> None:
    """Replace all of `addends`, one flat tensor for each rank, by their sum."""
    order = ring_order(chunk, len(addends))
    for blocks in in_blocks(addends):
        copy_to_all(blocks, reduce_in_order(blocks, order))


def sum_in_order(addends: Tensors, order: AdditionOrder, output: torch.Tensor) -> None:
    """Write the sum to `output`. The addends stay as they are, unless one of them is `output`."""
    (second, first), *rest = order
    for output_block, *blocks in in_blocks([output, *addends]):
        torch.add(blocks[second], blocks[first], out=output_block)
        for target, _ in rest:
            output_block.add_(blocks[target])


def in_blocks(tensors: Tensors) -> Iterator[Tensors]:
    """Flat tensors of one length, block by block."""
    if tensors[0].numel() <= BLOCK_NUMEL:
        return iter([tensors])
    return zip(*(tensor.split(BLOCK_NUMEL) for tensor in tensors), strict=True)


def reduce_in_order(blocks: Tensors, order: AdditionOrder) -> int:
    """Returns the index of the block that contains the sum. The others are undefined afterwards."""
    target = 0
    for target, source in order:
        blocks[target].add_(blocks[source])
    return target


def copy_to_all(blocks: Tensors, source: int) -> None:
    """Copy one block to all others."""
    for block in (*blocks[:source], *blocks[source + 1 :]):
        block.copy_(blocks[source])


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
