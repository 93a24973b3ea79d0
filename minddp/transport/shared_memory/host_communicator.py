"""One rank's part in all-reduces: receive the peers' messages, reduce chunks, announce the chunks that are done.

An all-reduce takes two kinds of messages, `AddendReady` and `ChunksDone`, and each pair of ranks has a socket for
them. A waiting rank sleeps in `poll` on all of its sockets. Messages also order memory: data written before a
message was sent can be read once it has arrived, since the kernel takes a lock to pass it on.

When a process ends, by whatever signal, its descriptor wakes all peers. A rank that exits cleanly sends `Leaving`
with its reason. A rank that is only slow has the group's time limit. `make_progress` never waits for room in a
socket, so no two ranks can wait for each other: the next `ChunksDone` replaces one that could not be sent.
`launch` may wait for room, since the other ranks always make progress.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from minddp.transport.shared_memory import messages, segments
from minddp.transport.shared_memory.addition_order import all_reduce_chunk, chunk_bounds, ring_order
from minddp.transport.shared_memory.peer_sockets import Peer, PeerSockets
from minddp.transport.shared_memory.reduction_tracker import ReductionTracker
from minddp.transport.shared_memory.segments import Segment


@dataclass(eq=False)
class AllReduce:
    """All-reduce `number` of this rank, in flight. `future` is done once the sum is there, or has an error."""

    number: int
    tensor: torch.Tensor  # flat; becomes the sum
    copy_to: torch.Tensor | None  # receives the sum as well
    deadline: float  # of time.monotonic()
    future: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)


class HostCommunicator:
    """All-reduces among the ranks of one host: `rank` and its `peers`.

    `make_progress` and `leave`, and the methods that they call, are for one thread at a time; any thread may call
    the others.
    """

    progress_delay_s = 0.02  # longer than a wait for the last bucket, which the peers wait for as well

    def __init__(self, rank: int, peers: Mapping[int, Peer], timeout_s: float):
        self._rank = rank
        self._ranks = sorted([rank, *peers])
        self._chunk = self._ranks.index(rank)  # that this rank owns
        self._timeout_s = timeout_s
        self._sockets = PeerSockets(rank, peers, timeout_s)
        self.announce = self._sockets.send  # that a segment is new or not used any more
        self.close = self._sockets.shut_down  # then `make_progress` sets `is_closed`
        self.is_closed = False

        # All-reduces of this rank in order, which `launch` adds and `make_progress` removes
        self._num_launched = 0
        self._in_flight: deque[AllReduce] = deque()
        self._tracker = ReductionTracker(rank, self._ranks)
        self._num_announced = dict.fromkeys(peers, 0)  # by peer: our chunks that it knows to be done

        self._segments: dict[tuple[int, int], Segment] = {}  # of the peers, by rank and number
        self._failure: str | None = None  # the error of every all-reduce from now on

    # ------------------------------------------------------------------ for any thread

    def launch(
        self, addend: torch.Tensor, segment: Segment, offset_bytes: int, copy_to: torch.Tensor | None = None
    ) -> AllReduce:
        """Begin to all-reduce `addend`, a flat tensor in `segment`, and then to copy the sum to `copy_to`."""
        all_reduce = AllReduce(self._num_launched, addend, copy_to, time.monotonic() + self._timeout_s)
        self._num_launched += 1
        self._in_flight.append(all_reduce)
        ready = messages.AddendReady(all_reduce.number, segment.number, offset_bytes, addend.numel(), addend.dtype)
        self._sockets.send(ready, also_to_self=True)
        return all_reduce

    def wait_for_message(self) -> None:
        """Sleep until `make_progress` has something to do."""
        self._sockets.sleep(self._limit_ms(float("inf")))

    # ------------------------------------------------------------------ for one thread at a time

    def make_progress(self, limit_s: float) -> bool:
        """Wait up to `limit_s` seconds for messages and handle them. True if any came; then there may be more."""
        events = self._sockets.poll(self._limit_ms(limit_s))
        try:
            for rank, message, descriptors in self._sockets.receive(events):
                self._handle(rank, message, descriptors)
            if self._failure is None:
                self._reduce()
                self._announce_chunks_done()
                self._complete()
            else:
                self._fail(self._failure)  # all-reduces that were launched since
        except BaseException as error:  # half a sum is useless, and a second attempt would add twice
            reason = error if isinstance(error, RuntimeError) else repr(error)
            self._fail(f"Rank {self._rank} cannot continue its all-reduces: {reason}")
            if not isinstance(error, Exception):
                raise
        return bool(events)

    def leave(self) -> None:
        """Disconnect from the peers. All-reduces in flight fail."""
        self._fail("The wrapper was dropped while this all-reduce was in flight.", reason_for_peers="")
        self._sockets.close()
        self._segments.clear()

    def _limit_ms(self, limit_s: float) -> float | None:
        """The time to sleep in milliseconds: at most `limit_s`, and until the first deadline."""
        with suppress(IndexError):  # none is in flight
            limit_s = min(limit_s, self._in_flight[0].deadline - time.monotonic())
        return None if limit_s == float("inf") else max(limit_s, 0) * 1000

    def _handle(self, rank: int, message: messages.Message, descriptors: Sequence[int]) -> None:
        match message:
            case messages.AddendReady():
                self._tracker.add_addend(rank, message)
            case messages.ChunksDone():
                self._tracker.num_done[rank] = message.total
            case messages.SegmentCreated():
                self._segments[rank, message.number] = segments.attach(descriptors[0], message.nbytes)
            case messages.SegmentDropped():
                del self._segments[rank, message.number]
            case messages.Ended() if rank == self._rank:
                self.is_closed = True
            case messages.Leaving() | messages.Ended():
                self._tracker.ended.setdefault(rank, message)
                self._sockets.disconnect(rank)

    def _reduce(self) -> None:
        """Reduce our chunk of every all-reduce with all addends. See [Note: all-reduce in shared memory]."""
        while (addends := self._tracker.next_to_reduce()) is not None:
            start, stop = chunk_bounds(self._chunk, len(addends), addends[0].numel, addends[0].dtype.itemsize)
            if start < stop:
                all_reduce_chunk(self._parts(addends, start, stop), ring_order(self._chunk, len(addends)))
            self._tracker.mark_reduced()
            self._announce_chunks_done()

    def _parts(self, addends: Sequence[messages.AddendReady], start: int, stop: int) -> list[torch.Tensor]:
        """Elements `start` to `stop` of the addend of each rank."""
        parts = []
        for rank, addend in zip(self._ranks, addends, strict=True):
            if rank == self._rank:
                ours = self._in_flight[addend.reduction - self._in_flight[0].number]
                parts.append(ours.tensor[start:stop])
                continue
            offset_bytes = addend.offset_bytes + start * addend.dtype.itemsize
            segment = self._segments[rank, addend.segment]
            parts.append(segments.tensor_over(segment, addend.dtype, stop - start, offset_bytes))
        return parts

    def _announce_chunks_done(self) -> None:
        """Send the number of our chunks that are done to all peers that do not know it yet."""
        done = messages.ChunksDone(self._tracker.num_done[self._rank])
        for rank, num_announced in self._num_announced.items():
            if num_announced != done.total and self._sockets.try_to_send(rank, done):
                self._num_announced[rank] = done.total

    def _complete(self) -> None:
        """Complete the all-reduces that are done; fail them all if the next one can never be done."""
        while self._in_flight and self._tracker.is_done(self._in_flight[0].number):
            done = self._in_flight[0]
            result = done.tensor if done.copy_to is None else done.copy_to
            if done.copy_to is not None:
                with torch.inference_mode(done.copy_to.is_inference()):  # each thread has a mode of its own
                    done.copy_to.copy_(done.tensor.view(done.copy_to.shape))
            done.future.set_result([result])
            self._in_flight.popleft()
        if not self._in_flight:
            return
        waiting = self._in_flight[0]
        failure = self._tracker.reason_for_failure(waiting.number)
        if failure is None and time.monotonic() >= waiting.deadline:
            failure = self._tracker.timeout_error(waiting.number, self._timeout_s)
        if failure is not None:
            self._fail(failure)

    def _fail(self, error: str, reason_for_peers: str | None = None) -> None:
        """Complete the all-reduces in flight, and all later ones, with an error. Peers receive the first reason."""
        if self._failure is None:
            self._failure = error
            reason = error if reason_for_peers is None else reason_for_peers
            leaving = messages.Leaving(reason[: messages.MAX_REASON_CHARACTERS])
            for rank in self._num_announced:
                self._sockets.try_to_send(rank, leaving)
                self._sockets.disconnect(rank)
        while self._in_flight:
            self._in_flight.popleft().future.set_exception(RuntimeError(self._failure))
