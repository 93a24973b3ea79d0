"""One rank's part in collectives: receive the peers' messages, reduce chunks, announce the chunks that are done.

An all-reduce takes two kinds of messages, `AddendReady` and `ChunksDone`, and each pair of ranks has a socket for
them. A waiting rank spins at first ([Note: spin wait]); then it sleeps in `poll` on all of its sockets. Messages
also order memory: data written before a message was sent can be read once it has arrived, since the kernel takes a
lock to pass it on.

When a process ends, by whatever signal, the kernel closes its sockets, which wakes all peers. If a forked child
keeps them open, the descriptor of the process does. A rank that exits cleanly sends `Leaving` with its reason. A
rank that is only slow has the group's time limit. `make_progress` never waits for room in a socket, so no two ranks
can wait for each other: the next `ChunksDone` replaces one that could not be sent. `launch` may wait for room,
since the other ranks always make progress.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from minddp.transport.protocols import AdditionOrder
from minddp.transport.shared_memory import messages, segments
from minddp.transport.shared_memory.addition_order import all_reduce_chunk, chunk_bounds, ring_order
from minddp.transport.shared_memory.collective import (
    BroadcastQueue,
    Collective,
    PendingBroadcast,
    SharedAllReduce,
)
from minddp.transport.shared_memory.messages import DTYPES
from minddp.transport.shared_memory.peer_sockets import Peer, PeerSockets
from minddp.transport.shared_memory.reduction_tracker import SAME_CALLS, ReductionTracker
from minddp.transport.shared_memory.segments import Segment
from minddp.transport.spin_wait import SpinWait


class HostCommunicator:
    """Collectives among the ranks of one host.

    `make_progress` and `leave`, and the methods that they call, are for one thread at a time; any thread may call
    the others.
    """

    progress_delay_s = 0.02  # longer than a wait for the last bucket, which the peers wait for as well

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Peer],
        timeout_s: float,
        global_ranks: Sequence[int] | None = None,
        spin_wait: SpinWait | None = None,
    ):
        self._rank = rank
        self._timeout_s = timeout_s
        self._spin_wait = spin_wait or SpinWait(0.0)
        self._sockets = PeerSockets(rank, peers, timeout_s)
        self.announce = self._sockets.send  # that a segment is new or not used any more
        self.close = self._sockets.shut_down  # then `make_progress` sets `is_closed`
        self.is_closed = False

        # All-reduces: those of this rank in order, which `launch` adds and `make_progress` removes
        self._num_launched = 0
        self._in_flight: deque[SharedAllReduce] = deque()
        self._tracker = ReductionTracker(rank, len(peers) + 1, global_ranks)
        self._num_announced = dict.fromkeys(peers, 0)  # by peer: our chunks that it knows to be done

        # The peers' segments, by rank and number, and their broadcasts
        self._segments: dict[tuple[int, int], Segment] = {}
        self._broadcasts = {peer: BroadcastQueue() for peer in peers}

        self._failure: str | None = None  # the error of every collective from now on

    # ------------------------------------------------------------------ for any thread

    def launch(
        self,
        addend: torch.Tensor,
        segment: Segment,
        offset_bytes: int,
        copy_to: torch.Tensor | None = None,
        order: AdditionOrder | None = None,
    ) -> SharedAllReduce:
        """Begin to all-reduce `addend`, a flat tensor in `segment`, and then to copy the sum to `copy_to`."""
        number = self._num_launched
        tensor = addend if copy_to is None else copy_to
        deadline = time.monotonic() + self._timeout_s
        pending = SharedAllReduce(
            f"all-reduce {number}", tensor, deadline, number=number, addend=addend, order=order
        )
        dtype = DTYPES.index(addend.dtype)
        ready = messages.AddendReady(number, segment.number, offset_bytes, addend.numel(), dtype)
        self._num_launched += 1
        self._in_flight.append(pending)
        self._sockets.send(ready, also_to_self=True)
        return pending

    def broadcast(self, tensor: torch.Tensor) -> Collective:
        """Send a small tensor to all peers.

        Raises:
            RuntimeError: a peer has been killed, or an earlier collective has failed.
        """
        failure = self._failure or self._tracker.reason_for_failure("a broadcast", sorted(self._tracker.killed))
        if failure is not None:
            raise RuntimeError(failure)
        self._sockets.send(messages.Broadcast(self._num_launched, messages.bytes_of(tensor)))
        sent = Collective(f"broadcast from rank {self._rank}", tensor, time.monotonic())
        sent.complete()
        return sent

    def receive_broadcast(self, tensor: torch.Tensor, source: int) -> PendingBroadcast:
        """Begin to replace a tensor with any strides by the one that rank `source` broadcasts."""
        queue = self._broadcasts[source]
        name = f"broadcast {queue.num_calls} from rank {source}"
        deadline = time.monotonic() + self._timeout_s
        pending = PendingBroadcast(name, tensor, deadline, num_launched=self._num_launched)
        queue.num_calls += 1
        queue.expected.append(pending)
        if queue.arrived or self._failure is not None:  # no message will come that wakes a thread
            self._sockets.wake()
        return pending

    def wait_for_message(self) -> None:
        """Sleep until `make_progress` has something to do."""
        self._sockets.sleep(self._limit_ms(float("inf")))

    # ------------------------------------------------------------------ for one thread at a time

    def make_progress(self, limit_s: float) -> bool:
        """Wait up to `limit_s` seconds for messages and handle them. True if any came; then there may be more."""
        self._spin_wait.spin(partial(self._sockets.poll, 0), limit_s)
        events = self._sockets.poll(self._limit_ms(limit_s))
        try:
            for rank, message, descriptors in self._sockets.receive(events):
                self._handle(rank, message, descriptors)
            if self._failure is None:
                self._reduce()
                self._announce_chunks_done()
                self._complete()
            else:
                self._fail(self._failure)  # collectives that were launched since
        except BaseException as error:  # half a sum is useless, and a second attempt would add twice
            reason = error if isinstance(error, RuntimeError) else repr(error)
            self._fail(f"Rank {self._tracker.global_ranks[self._rank]} cannot continue its collectives: {reason}")
            if not isinstance(error, Exception):
                raise
        return bool(events)

    def leave(self) -> None:
        """Disconnect from the peers. Collectives in flight fail."""
        self._fail("The wrapper was dropped while this all-reduce was in flight.", reason_for_peers="")
        self._sockets.close()
        self._segments.clear()

    def _limit_ms(self, limit_s: float) -> float | None:
        """The time to sleep in milliseconds: at most `limit_s`, and until the first deadline."""
        for collectives in self._queues():
            with suppress(IndexError):  # none is in flight
                limit_s = min(limit_s, collectives[0].deadline - time.monotonic())
        return None if limit_s == float("inf") else max(limit_s, 0) * 1000

    def _handle(self, rank: int, message: messages.Message | None, descriptors: Sequence[int]) -> None:
        match message:
            case messages.AddendReady():
                self._tracker.add_addend(rank, message)
            case messages.ChunksDone():
                self._tracker.num_done[rank] = message.total
            case messages.Broadcast():
                self._broadcasts[rank].arrived.append(message)
            case messages.SegmentCreated():
                self._segments[rank, message.number] = segments.attach(descriptors[0], message.nbytes)
            case messages.SegmentDropped():
                del self._segments[rank, message.number]
            case messages.Leaving():
                self._tracker.left[rank] = message.reason
            case None if rank == self._rank:
                self.is_closed = True
            case None:
                self._tracker.mark_ended(rank)
                self._sockets.disconnect(rank)

    def _reduce(self) -> None:
        """Reduce our chunk of every all-reduce with all addends. See [Note: all-reduce in shared memory]."""
        while (addends := self._tracker.next_to_reduce()) is not None:
            numel, itemsize = addends[0].numel, DTYPES[addends[0].dtype].itemsize
            start, stop = chunk_bounds(self._rank, len(addends), numel, itemsize)
            if start < stop:
                order = self._own(addends).order or ring_order(self._rank, len(addends))
                all_reduce_chunk(self._chunks(addends, start, stop), order)
            self._tracker.mark_reduced()
            self._announce_chunks_done()

    def _own(self, addends: Sequence[messages.AddendReady]) -> SharedAllReduce:
        """This rank's part of an all-reduce."""
        return self._in_flight[addends[self._rank].reduction - self._in_flight[0].number]

    def _chunks(self, addends: Sequence[messages.AddendReady], start: int, stop: int) -> list[torch.Tensor]:
        """Elements `start` to `stop` of the addend of each rank."""
        chunks = []
        for rank, addend in enumerate(addends):
            if rank == self._rank:
                chunks.append(self._own(addends).addend[start:stop])
                continue
            dtype = DTYPES[addend.dtype]
            offset_bytes = addend.offset_bytes + start * dtype.itemsize
            segment = self._segments[rank, addend.segment]
            chunks.append(segments.tensor_over(segment, dtype, stop - start, offset_bytes))
        return chunks

    def _announce_chunks_done(self) -> None:
        """Send the number of our chunks that are done to all peers that do not know it yet."""
        done = messages.ChunksDone(self._tracker.num_done[self._rank])
        for rank, num_announced in self._num_announced.items():
            if num_announced != done.total and self._sockets.try_to_send(rank, done):
                self._num_announced[rank] = done.total

    def _complete(self) -> None:
        """Complete the collectives that are done; fail them all if one of them can never be done."""
        while self._in_flight and self._tracker.is_done(self._in_flight[0].number):
            self._in_flight[0].complete()
            self._in_flight.popleft()
        for queue in self._broadcasts.values():
            queue.match()
        if (failure := next(self._failures(), None)) is not None:
            self._fail(failure)

    def _failures(self) -> Iterator[str]:
        """Why a collective in flight can never complete, or has exceeded its time limit."""
        tracker, now = self._tracker, time.monotonic()
        if self._in_flight:
            first = self._in_flight[0]
            if (reason := tracker.reason_for_failure(first.name, tracker.missing(first.number))) is not None:
                yield reason
            if now >= first.deadline:
                yield tracker.timeout_error(first.number, self._timeout_s)
        for source, queue in self._broadcasts.items():
            if queue.expected:
                name = queue.expected[0].name
                if (reason := tracker.reason_for_failure(name, [source])) is not None:
                    yield reason
                if now >= queue.expected[0].deadline:
                    yield f"{name.capitalize()} has not come within {self._timeout_s:g} s. {SAME_CALLS}"

    def _fail(self, error: str, reason_for_peers: str | None = None) -> None:
        """Complete the collectives in flight, and all later ones, with an error. Peers receive the first reason."""
        if self._failure is None:
            self._failure = error
            reason = error if reason_for_peers is None else reason_for_peers
            leaving = messages.Leaving(reason[: messages.MAX_REASON_CHARACTERS])
            for rank in self._broadcasts:
                self._sockets.try_to_send(rank, leaving)
                self._sockets.disconnect(rank)
        for collectives in self._queues():
            while collectives:
                collectives.popleft().fail(self._failure)

    def _queues(self) -> Iterator[deque[Any]]:
        """Collectives that are not complete, in order."""
        yield self._in_flight
        for queue in self._broadcasts.values():
            yield queue.expected
