"""The collectives, each as a generator: it yields the counter that all ranks have to reach before it goes on.

[Note: collectives in shared memory]
Each rank puts its contribution into memory that all can read, a copy of the caller's tensor or the tensor itself,
and raises `begun`. Once all have, each rank computes its own part of the result from all contributions, and raises
`done`: from then on it touches no memory of the others. The collectives differ in what a rank contributes and
computes:

                    contributes                computes, once all have begun         then
    all_reduce      the chunks of the others   the sum of its chunk, for all ranks   waits for all, copies the rest
    small ones      all                        the whole sum, for itself
    reduce_scatter  the parts of the others    the sum of its part
    all_gather      its tensor                 copies all tensors
    broadcast       the source: its tensor     copies it
    barrier

In an all-reduce of W ranks rank r owns chunk r:

      rank 0's memory   rank 1's memory   rank 2's memory
    +-----------------+-----------------+-----------------+
    |     chunk 0     |     chunk 0     |     chunk 0     |   rank 0 reads all three, adds them,
    |- - - - - - - - -|- - - - - - - - -|- - - - - - - - -|   and writes the sum into all three
    |     chunk 1     |     chunk 1     |     chunk 1     |   rank 1
    |- - - - - - - - -|- - - - - - - - -|- - - - - - - - -|
    |     chunk 2     |     chunk 2     |     chunk 2     |   rank 2
    +-----------------+-----------------+-----------------+

The order in which an owner adds decides the bits: `addition_order.py`. It adds one block of all contributions at a
time that fits into the second-level cache, so that the operands are still there when they are overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from minddp.transport.shared_memory.addition_order import (
    all_reduce_chunk,
    chunk_bounds,
    in_blocks,
    pieces,
    sum_in_order,
)

if TYPE_CHECKING:
    from minddp.transport.shared_memory.contributions import Contribution
    from minddp.transport.shared_memory.progress_engine import Awaited, ProgressEngine

Steps = Iterator["Awaited"]
SMALL_BYTES = 64 * 1024  # up to here every rank adds everything, which saves waiting a second time


def all_reduce(engine: ProgressEngine, number: int, ours: Contribution, tensor: torch.Tensor) -> Steps:
    """Replace the flat `tensor` on each rank by the sum."""
    bounds = [
        chunk_bounds(chunk, engine.num_ranks, tensor.numel(), tensor.itemsize) for chunk in range(engine.num_ranks)
    ]
    others = [bound for chunk, bound in enumerate(bounds) if chunk != engine.rank]
    if not ours.is_callers:
        for start, stop in others:
            copy_in_blocks(tensor[start:stop], ours.tensor[start:stop])
    yield engine.begin(number, ours)
    start, stop = bounds[engine.rank]
    if start < stop:
        all_reduce_chunk(engine.contributions(number, tensor, start, stop), engine.rank)
    engine.finish(number)
    yield engine.done
    if not ours.is_callers:
        for start, stop in others:
            copy_in_blocks(ours.tensor[start:stop], tensor[start:stop])


def all_reduce_small(engine: ProgressEngine, number: int, ours: Contribution, tensor: torch.Tensor) -> Steps:
    """The same, by a copy, if `tensor` has at most `SMALL_BYTES`."""
    ours.tensor.copy_(tensor)
    yield engine.begin(number, ours)
    numel = tensor.numel()
    contributions = engine.contributions(number, ours.tensor, 0, numel)
    for start, stop, order in pieces(engine.num_ranks, numel, tensor.itemsize, 0, numel):
        sum_in_order([one[start:stop] for one in contributions], order, tensor[start:stop])
    engine.finish(number)


def reduce_scatter(
    engine: ProgressEngine, number: int, ours: Contribution, tensor: torch.Tensor, output: torch.Tensor
) -> Steps:
    """Fill `output` with this rank's part of the sum: the flat `tensor` has one of this size for each rank."""
    size = output.numel()
    if not ours.is_callers:
        for rank, (part, copy) in enumerate(zip(tensor.split(size), ours.tensor.split(size), strict=True)):
            if rank != engine.rank:
                copy_in_blocks(part, copy)
    yield engine.begin(number, ours)
    first, last = engine.rank * size, (engine.rank + 1) * size
    for start, stop, order in pieces(engine.num_ranks, tensor.numel(), tensor.itemsize, first, last):
        sum_in_order(engine.contributions(number, tensor, start, stop), order, output[start - first : stop - first])
    engine.finish(number)
    if ours.is_callers:
        yield engine.done


def all_gather(
    engine: ProgressEngine, number: int, ours: Contribution, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]
) -> Steps:
    """Copy the `tensor` of each rank to one of `outputs`, in rank order.

    This rank's own contribution is read from the copy: `tensor` may lie in the output for another rank.
    """
    if not ours.is_callers:
        copy_in_blocks(tensor, ours.tensor)
    yield engine.begin(number, ours)
    contributions = engine.contributions(number, ours.tensor, 0, tensor.numel())
    for contribution, output in zip(contributions, outputs, strict=True):
        copy_in_blocks(contribution, output)
    engine.finish(number)
    if ours.is_callers:
        yield engine.done


def broadcast(engine: ProgressEngine, number: int, ours: Contribution, tensor: torch.Tensor, source: int) -> Steps:
    """Copy the `tensor` of rank `source` to all."""
    if engine.rank == source:
        if not ours.is_callers:
            copy_in_blocks(tensor, ours.tensor)
        begun = engine.begin(number, ours)
        if ours.is_callers:
            yield begun
        engine.finish(number)
        if ours.is_callers:
            yield engine.done
    else:
        yield engine.begin(number, ours)
        copy_in_blocks(engine.contribution(number, source, 0, tensor.numel()), tensor)
        engine.finish(number)


def barrier(engine: ProgressEngine, number: int, ours: Contribution) -> Steps:
    """All ranks have called it, and all that this rank has called before is done, as after gloo's."""
    yield engine.begin(number, ours)
    yield engine.earlier(number)
    engine.finish(number)


def copy_in_blocks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Torch would copy a long tensor by several threads, one team for each thread that copies."""
    for source_block, target_block in in_blocks([source, target]):
        target_block.copy_(source_block)
