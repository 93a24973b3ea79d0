"""The communicator of a host's ranks, extended by a lane that adds the sums of the other hosts.

A chunk is cut into pieces of at most `PIECE_BYTES`. While one crosses, the next is reduced and the one before it is
copied: the network, the slowest of the three, waits for the other two only at the first piece and the last. Gloo
sends two at a time. Each lane sends its pieces in one order on every host, since all ranks launch in one order.
"""

from __future__ import annotations

import ctypes
import datetime
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from minddp.transport.shared_memory.host_communicator import HostCommunicator
from minddp.transport.shared_memory.messages import DTYPES, AddendReady
from minddp.transport.shared_memory.peer_sockets import Peer

PIECE_BYTES = 4 * 1024 * 1024
GRACE_S = 2.0  # for pieces in flight when a lane is closed
HEAD_START_S = 5.0  # shared memory times out before gloo, since it knows which rank is missing

Crossing = torch.futures.Future[Any]  # done once a piece has crossed


@dataclass(frozen=True)
class Hosts:
    """`ranks[h]` are the ranks on host h, ascending. Hosts are in the order of their lowest ranks.

    Ranks that can share memory are on one host: they have one kernel and one network namespace.
    """

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def grouped(cls, names: Sequence[str]) -> Hosts:
        """From the name of each rank's host, in rank order."""
        return cls(tuple(sorted(map(tuple, wording.by_value(dict(enumerate(names))).values()))))

    @property
    def num_lanes(self) -> int:
        """The number of ranks on the smallest host."""
        return min(map(len, self.ranks))

    def ranks_beside(self, rank: int) -> tuple[int, ...]:
        """All ranks on this rank's host, itself included. Its index among them is its local rank."""
        return next(ranks for ranks in self.ranks if rank in ranks)

    def lane(self, local_rank: int) -> list[int]:
        """The ranks with this local rank, host by host."""
        return [ranks[local_rank] for ranks in self.ranks]


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
        self._in_flight: list[Crossing] = []

    def all_reduce(self, tensor: torch.Tensor, when_done: Callable[[], None]) -> Crossing:
        """Begin, in place. Another thread calls `when_done`; call `finish` after that."""
        assert self._group is not None, "the lane has been closed"
        work = self._group.allreduce([tensor], self._options)  # type: ignore[attr-defined]
        crossing: Crossing = work.get_future()
        self._in_flight.append(crossing)
        crossing.add_done_callback(lambda _: when_done())
        return crossing

    def finish(self, crossing: Crossing) -> None:
        """Release an all-reduce that is done, and its memory. Raises a RuntimeError if it has failed."""
        self._in_flight = [other for other in self._in_flight if other is not crossing]
        try:
            crossing.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"The all-reduce between hosts, of {wording.ranks(self.ranks)}, has failed: {error} One of them "
                f"or another rank of its host has ended, or the network is down. Look for the cause there, and "
                f"start all ranks again."
            ) from error

    def close(self, grace_s: float = 0.0) -> None:
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
        return all(crossing.done() for crossing in self._in_flight)


class Piece(NamedTuple):
    """A part of our chunk that crosses: `parts[r]` is its memory in the bucket of the host's local rank r."""

    parts: Sequence[torch.Tensor]
    crossing: Crossing


class MultiHostCommunicator(HostCommunicator):
    """All-reduces between hosts, in the memory of each host and by this rank's lane, if it has one."""

    progress_delay_s = 0.001  # the network should be busy while backward computes

    def __init__(self, hosts: Hosts, rank: int, peers: Mapping[int, Peer], timeout_s: float, lane: Lane | None):
        global_ranks = hosts.ranks_beside(rank)
        super().__init__(global_ranks.index(rank), peers, timeout_s, global_ranks)
        self._lane = lane
        self.hosts = hosts
        self._crossing: deque[deque[Piece]] = deque()  # the pieces of each all-reduce that this rank has not done

    def leave(self) -> None:
        super().leave()
        if self._lane is not None:
            self._lane.close(GRACE_S)

    def _reduce(self) -> None:
        """Send the pieces of every all-reduce with all addends, and copy the pieces that have crossed."""
        while (addends := self._tracker.next_to_reduce(ahead=len(self._crossing))) is not None:
            self._crossing.append(deque(self._send(addends)))
        while self._crossing and self._all_have_crossed(self._crossing[0]):
            self._crossing.popleft()
            self._tracker.mark_reduced()
            self._announce_chunks_done()

    def _send(self, addends: Sequence[AddendReady]) -> Iterator[Piece]:
        """Reduce our chunk within the host, piece by piece, and begin the all-reduce of each piece."""
        if self._lane is None:
            return
        numel, itemsize = addends[0].numel, DTYPES[addends[0].dtype].itemsize
        bounds = chunk_bounds(self._rank, self.hosts.num_lanes, numel, itemsize)
        order = ring_order(self._rank, len(addends))
        for start, stop in pieces_of(*bounds, itemsize):
            parts = self._chunks(addends, start, stop)
            for blocks in in_blocks(parts):
                reduce_in_order(blocks, order)
            yield Piece(parts, self._lane.all_reduce(parts[self._rank], self._sockets.wake))

    def _all_have_crossed(self, pieces: deque[Piece]) -> bool:
        """Copy the pieces that have crossed; True if these were all."""
        while pieces and pieces[0].crossing.done():
            assert self._lane is not None, "without a lane there are no pieces"
            piece = pieces.popleft()
            self._lane.finish(piece.crossing)
            for blocks in in_blocks(piece.parts):
                copy_to_all(blocks, self._rank)
        return not pieces

    def _fail(self, error: str, reason_for_peers: str | None = None) -> None:
        super()._fail(error, reason_for_peers)
        self._crossing.clear()
        if self._lane is not None:
            self._lane.close()


def pieces_of(start: int, stop: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """First and last-plus-one element of each piece of a chunk."""
    numel = PIECE_BYTES // itemsize
    for first in range(start, stop, numel):
        yield first, min(first + numel, stop)
