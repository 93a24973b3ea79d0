"""The communicator of a host's ranks, extended by a lane that adds the sums of the other hosts.

While one chunk crosses, those of later all-reduces are reduced. Gloo sends two at a time. Each lane sends its
chunks in one order on every host, since all ranks launch in one order.
"""

from __future__ import annotations

import ctypes
import datetime
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from minddp.transport.shared_memory.messages import AddendReady
from minddp.transport.shared_memory.peer_sockets import Peer

GRACE_S = 2.0  # for chunks in flight when a lane is closed
HEAD_START_S = 5.0  # shared memory times out before gloo, since it knows which rank is missing

GlooFuture = torch.futures.Future[Any]


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
        self._in_flight: list[GlooFuture] = []

    def all_reduce(self, tensor: torch.Tensor, when_done: Callable[[], None]) -> GlooFuture:
        """Begin, in place. Another thread calls `when_done`; call `finish` after that."""
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
        return all(future.done() for future in self._in_flight)


class Crossing(NamedTuple):
    """Our chunk of an all-reduce on its way: `parts[r]` is its memory in the bucket of the host's local rank r."""

    parts: Sequence[torch.Tensor]
    sum: GlooFuture


class MultiHostCommunicator(HostCommunicator):
    """All-reduces between hosts, in the memory of each host and by this rank's lane, if it has one."""

    progress_delay_s = 0.001  # the network should be busy while backward computes

    def __init__(self, hosts: Hosts, rank: int, peers: Mapping[int, Peer], timeout_s: float, lane: Lane | None):
        super().__init__(rank, peers, timeout_s)
        self._lane = lane
        self.hosts = hosts
        self._crossing: deque[Crossing | None] = deque()  # of each all-reduce that this rank has not done

    def leave(self) -> None:
        super().leave()
        if self._lane is not None:
            self._lane.close(GRACE_S)

    def _reduce(self) -> None:
        """Send our chunk of every all-reduce with all addends, and copy the chunks that have crossed."""
        while (addends := self._tracker.next_to_reduce(ahead=len(self._crossing))) is not None:
            self._crossing.append(self._send(addends))
        while self._crossing and self._has_crossed(self._crossing[0]):
            self._crossing.popleft()
            self._tracker.mark_reduced()
            self._announce_chunks_done()

    def _send(self, addends: Sequence[AddendReady]) -> Crossing | None:
        """Reduce our chunk within the host, and begin its all-reduce between the hosts, if we have one."""
        numel, itemsize = addends[0].numel, addends[0].dtype.itemsize
        start, stop = chunk_bounds(self._chunk, self.hosts.num_lanes, numel, itemsize)
        if self._lane is None or start == stop:
            return None
        parts = self._parts(addends, start, stop)
        for blocks in in_blocks(parts):
            reduce_in_order(blocks, ring_order(self._chunk, len(addends)))
        return Crossing(parts, self._lane.all_reduce(parts[self._chunk], self._sockets.wake))

    def _has_crossed(self, crossing: Crossing | None) -> bool:
        """Copy the sum to the ranks of this host if it has come; False if it has not."""
        if crossing is None:
            return True
        if not crossing.sum.done():
            return False
        assert self._lane is not None, "it has sent the chunk"
        self._lane.finish(crossing.sum)
        for blocks in in_blocks(crossing.parts):
            copy_to_all(blocks, self._chunk)
        return True

    def _fail(self, error: str, reason_for_peers: str | None = None) -> None:
        super()._fail(error, reason_for_peers)
        self._crossing.clear()
        if self._lane is not None:
            self._lane.close()
