r"""All-reduce for groups that span hosts: shared memory within a host, gloo between hosts, and no byte sent twice.

Each bucket is cut into as many chunks as the smallest host has ranks. Chunk i belongs to *lane* i: the ranks that
have local rank i on their host, one of each host. An all-reduce is then

          host A                        host B
     rank 0      rank 1            rank 2      rank 3
    +-------+   +-------+         +-------+   +-------+
    |chunk 0|   |chunk 0|         |chunk 0|   |chunk 0|     lane 0: ranks 0 and 2
    |- - - -|   |- - - -|         |- - - -|   |- - - -|
    |chunk 1|   |chunk 1|         |chunk 1|   |chunk 1|     lane 1: ranks 1 and 3
    +-------+   +-------+         +-------+   +-------+

    1. reduce   in memory, rank 0 adds chunk 0 of ranks 0 and 1, and rank 1 adds their chunk 1; host B does the same
    2. cross    lane 0 all-reduces chunk 0 by gloo, and lane 1 at the same time chunk 1
    3. copy     rank 0 writes chunk 0 into the bucket of rank 1, and rank 1 writes chunk 1 into that of rank 0

Steps 1 and 3 are the all-reduce of `shared_memory/collectives.py`. With one lane a single rank of each host would
do all the work; with several the ranks share it, and the bytes between the hosts are the same: with H hosts,
2 (H-1)/H of a bucket leave each, which is the minimum. While one chunk crosses, later ones are reduced.

[Note: the order of addition between hosts]
The bits are not those of gloo's flat ring, nor of torch's DDP: (a + b) + (c + d) is not ((a + b) + c) + d. But they
are as deterministic, equal on all ranks, and depend only on the placement of the ranks and on the tensor:

    first     the ranks of each host, in the order of gloo in a group of these ranks; in chunk i the last one added
              is the host's local rank i (see `shared_memory/addition_order.py`)
    then      the hosts, in the order of their lowest ranks, in the order of gloo for a chunk among as many ranks
"""

from __future__ import annotations

import ctypes
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from minddp.platform import wording
from minddp.transport.shared_memory.addition_order import (
    chunk_bounds,
    copy_to_all,
    in_blocks,
    reduce_in_order,
    ring_order,
)
from minddp.transport.shared_memory.collectives import copy_in_blocks
from minddp.transport.shared_memory.contributions import Contribution
from minddp.transport.shared_memory.progress_engine import Awaited, ProgressEngine

GRACE_S = 2.0  # for chunks in flight when a lane is closed
HEAD_START_S = 5.0  # shared memory times out before gloo, since it knows which rank is missing

GlooFuture = torch.futures.Future[Any]


class Crossing(NamedTuple):
    """A chunk that gloo adds between hosts: what an all-reduce waits for, beside counters."""

    future: GlooFuture
    local_ranks: Sequence[int]

    def all_reach(self, number: int) -> bool:
        return self.future.done()

    def behind(self, number: int) -> list[int]:
        """The other ranks of this host: if one ends, the all-reduce cannot be done any more."""
        return [] if self.future.done() else list(self.local_ranks)


class Lane:
    """All-reduces between `ranks` of the whole group: `rank` and one on each other host.

    The constructor is collective. It raises a RuntimeError if one of the ranks does not connect in time.
    """

    def __init__(
        self, store: dist.Store, ranks: Sequence[int], rank: int, connect_timeout_s: float, timeout_s: float
    ):
        self.ranks = ranks
        connect_timeout = datetime.timedelta(seconds=connect_timeout_s)
        group = ProcessGroupGloo(store, ranks.index(rank), len(ranks), connect_timeout)
        self._group: ProcessGroupGloo | None = group
        # The destructor waits for collectives in flight, forever if a rank on another host has given up but lives.
        # This reference leaves it to `close`.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._options = dist.AllreduceOptions()
        self._options.timeout = datetime.timedelta(seconds=timeout_s + HEAD_START_S)
        self._in_flight: list[GlooFuture] = []

    def all_reduce(self, tensor: torch.Tensor, when_done: Callable[[], None]) -> GlooFuture:
        """Begin, in ours. Another thread calls `when_done`; call `finish` after that."""
        assert self._group is not None, "the lane has been closed"
        work = self._group.allreduce([tensor], self._options)  # type: ignore[attr-defined]
        future: GlooFuture = work.get_future()
        self._in_flight.append(future)
        future.add_done_callback(lambda _: when_done())
        return future

    def finish(self, future: GlooFuture) -> None:
        """Release an all-reduce that is done, and its memory. Raises a RuntimeError if it has failed."""
        self._in_flight = [other for other in self._in_flight if other is not future]
        try:
            future.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"The all-reduce between hosts, of {wording.ranks(self.ranks)}, has failed: {error} One of them "
                f"or another rank of its host has ended, or the network is down. Look for the cause there, and "
                f"start all ranks again."
            ) from error

    def close(self, grace_s: float = GRACE_S) -> None:
        """Destroy the group if nothing is in flight, so that the other hosts notice it. May be called again.

        After a failure a collective may stay in flight forever. Then the group lives until the process ends.
        """
        end = time.monotonic() + grace_s
        while not self._is_idle() and time.monotonic() < end:
            time.sleep(0.01)
        if self._group is not None and self._is_idle():
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))
            self._group = None

    def _is_idle(self) -> bool:
        return all(future.done() for future in self._in_flight)


def all_reduce_across(
    engine: ProgressEngine, number: int, ours: Contribution, tensor: torch.Tensor, num_lanes: int
) -> Iterator[Awaited]:
    """Replace the flat `tensor` on each rank of all hosts by the sum. A rank beyond the lanes has no chunk."""
    if not ours.is_callers:
        copy_in_blocks(tensor, ours.tensor)
    yield engine.begin(number, ours)
    lane = engine.lane
    start, stop = chunk_bounds(engine.rank, num_lanes, tensor.numel(), tensor.itemsize)
    if lane is not None and start < stop:
        addends = engine.contributions(number, ours.tensor, start, stop)
        for blocks in in_blocks(addends):
            reduce_in_order(blocks, ring_order(engine.rank, engine.num_ranks))
        future = lane.all_reduce(addends[engine.rank], engine.wake_self)
        yield Crossing(future, [rank for rank in range(engine.num_ranks) if rank != engine.rank])
        lane.finish(future)
        for blocks in in_blocks(addends):
            copy_to_all(blocks, engine.rank)
    engine.finish(number)
    yield engine.done
    if not ours.is_callers:
        copy_in_blocks(ours.tensor, tensor)
