"""One rank's part in collectives: it hears what the others say, adds up its chunks, and tells.

[Note: telling and waiting]
All that ranks have to tell each other for an all-reduce are two things:

    Addend       "in":   my gradients of all-reduce n lie there; I do not touch them until it is done
    ChunksDone   "done": I have written my chunks of the first n all-reduces, into everybody's memory

Each pair of ranks has a socket for them. A rank that waits stays awake at first, see `awake.py`. Then
it sleeps in `poll` on all of its sockets, so that waiting takes no time from the cores that compute. Messages also
keep memory in order: what was written before one was sent can be read once it has arrived, since the kernel takes
a lock to hand it over.

Nobody waits for ever for somebody who is gone. When a process ends, by whatever signal, the kernel closes its
sockets, and that wakes all peers; should a child that it has forked keep them open, the descriptor of the process
tells. Who leaves in good order says farewell, and why. Who is merely late is given the group's time limit.

Who attends to the sockets never waits for one to have room, so no two ranks can wait for each other: `ChunksDone`
counts from the beginning, and one that could not be sent is made up for by the next. Who launches may wait for
room, since the others always attend: see [Note: who attends].
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from minddp.transport.shared_memory import messages, segments
from minddp.transport.shared_memory.collective import Listener, Reduction
from minddp.transport.shared_memory.hearing import Hearing, content_of
from minddp.transport.shared_memory.ledger import Ledger
from minddp.transport.shared_memory.messages import (
    DTYPES,
    Addend,
    ChunksDone,
    Farewell,
    Message,
    Nudge,
    SegmentDropped,
    SegmentMade,
    Told,
)
from minddp.transport.shared_memory.order import chunk_bounds, reduce_chunk
from minddp.transport.shared_memory.rendezvous import Peer
from minddp.transport.shared_memory.segments import Segment
from minddp.transport.spin_wait import Wakefulness


class Exchange:
    """The sockets, the peers' segments, and what is under way. Unattended, it can wait for `patience_s` seconds.

    Any thread may `introduce`, `forget`, `launch`, `tell` and `hear`. `attend` and `leave` are for one thread at a
    time, and so is everything that they touch.
    """

    patience_s = 0.02  # peers wait for our last bucket in any case

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Peer],
        timeout_s: float,
        names: Sequence[int] | None = None,
        wakefulness: Wakefulness | None = None,
    ):
        self._process = os.getpid()
        self._rank = rank
        self._peers = peers
        self._peer_sockets = [peer.socket for peer in peers.values()]
        self._to_self, self._from_self = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._timeout_s = timeout_s
        self._wakefulness = wakefulness or Wakefulness(0.0)
        self._num_launched = 0
        self._under_way: deque[Reduction] = deque()  # in order; `launch` adds, `attend` removes
        self._ledger = Ledger(rank, len(peers) + 1, names)
        self._segments: dict[tuple[int, int], Segment] = {}  # the peers', by rank and number
        self._num_told = dict.fromkeys(peers, 0)  # of our chunks, how many each peer knows to be done
        self._hearings = {peer: Hearing() for peer in peers}
        self._failure: str | None = None
        self.is_closed = False
        self._on_event: dict[int, Callable[[], object]] = {}
        self._polls = (select.poll(), select.poll())  # one to sleep in `attend`, one in `await_news`
        self._listen()

    # ------------------------------------------------------------------ for any thread

    def introduce(self, descriptor: int, made: SegmentMade) -> None:
        """Give a new segment to all peers."""
        self._send(self._peer_sockets, made, [descriptor])

    def forget(self, dropped: SegmentDropped) -> None:
        """Tell all peers that a segment will not be used any more."""
        self._send(self._peer_sockets, dropped)

    def launch(self, tensor: torch.Tensor, segment: Segment, offset_bytes: int) -> Reduction:
        """Begin to all-reduce `tensor`, which is flat and lies in `segment`."""
        number = self._num_launched
        reduction = Reduction(f"all-reduce {number}", tensor, time.monotonic() + self._timeout_s, number=number)
        dtype = DTYPES.index(tensor.dtype)
        addend = Addend(reduction.number, segment.number, offset_bytes, tensor.numel(), dtype)
        self._num_launched += 1
        self._under_way.append(reduction)
        self._send([*self._peer_sockets, self._to_self], addend)
        return reduction

    def tell(self, tensor: torch.Tensor) -> None:
        """Broadcast a small tensor. See [Note: broadcasts].

        Raises:
            RuntimeError: somebody has been killed, or this exchange has failed before.
        """
        failure = self._failure or self._ledger.lost("a broadcast", sorted(self._ledger.killed))
        if failure is not None:
            raise RuntimeError(failure)
        self._send(self._peer_sockets, Told(self._num_launched, content_of(tensor)))

    def hear(self, tensor: torch.Tensor, source: int) -> Listener:
        """Begin to replace a tensor, of any strides, by what rank `source` tells."""
        hearing = self._hearings[source]
        name = f"broadcast {hearing.num_listened} from rank {source}"
        deadline = time.monotonic() + self._timeout_s
        listener = Listener(name, tensor, deadline, num_launched=self._num_launched)
        hearing.num_listened += 1
        hearing.listening.append(listener)
        if hearing.told or self._failure is not None:  # else there will be news
            self._send([self._to_self], Nudge())
        return listener

    def await_news(self) -> None:
        """Sleep until there is something to attend to."""
        self._polls[1].poll(self._limit_ms(float("inf")))

    def close(self) -> None:
        """Let `attend` find that it is over."""
        if os.getpid() != self._process:
            return  # a forked child has copies of the sockets, but no part in this
        with suppress(OSError):  # it has been closed before
            self._to_self.shutdown(socket.SHUT_RDWR)

    def _send(self, listeners: Sequence[socket.socket], message: Message, descriptors: Sequence[int] = ()) -> None:
        encoded = messages.encode(message)
        for listener in listeners:
            if not messages.send(listener, encoded, descriptors, timeout_s=self._timeout_s):
                raise RuntimeError(
                    f"A rank has not taken in its messages for {self._timeout_s:g} s. Its process may be stopped; "
                    f"let it go on, or start all ranks again."
                )

    # ------------------------------------------------------------------ for one thread at a time

    def attend(self, limit_s: float) -> bool:
        """Wait for at most `limit_s` seconds until somebody says something, and do what there is to do then.

        Whether somebody has, and so may have more to say.
        """
        poll = self._polls[0].poll
        self._wakefulness.stay_awake(partial(poll, 0), limit_s)
        events = poll(self._limit_ms(limit_s))
        try:
            for descriptor, _ in events:
                on_event = self._on_event.get(descriptor)
                if on_event is not None:  # it may have been lost a moment ago, by its other descriptor
                    on_event()
            if self._failure is None:
                self._add_up()
                self._land()
            else:
                self._fail(self._failure)  # what has been launched since
        except BaseException as error:  # half a sum is of no use to anybody, and a second try would add twice
            self._fail(f"Rank {self._ledger.names[self._rank]} cannot go on with its collectives: {error!r}")
            if not isinstance(error, Exception):
                raise
        return bool(events)

    def leave(self) -> None:
        """Say farewell; what is still under way fails."""
        self._fail("The wrapper was dropped while this all-reduce was under way.", farewell="")
        self._to_self.close()
        self._from_self.close()
        for peer in self._peers.values():
            peer.close()
        self._segments.clear()
        self._on_event.clear()

    def _add_up(self) -> None:
        """Do our chunk of every all-reduce whose addends are all in. See [Note: all-reduce in shared memory]."""
        while (addends := self._ledger.next_to_add_up()) is not None:
            start, stop = chunk_bounds(
                self._rank, len(addends), addends[0].numel, DTYPES[addends[0].dtype].itemsize
            )
            if start < stop:
                chunks = [self._chunk(rank, addend, start, stop) for rank, addend in enumerate(addends)]
                reduce_chunk(chunks, owner=self._rank)
            self._ledger.note_added_up()
            self._tell_peers()

    def _chunk(self, rank: int, addend: Addend, start: int, stop: int) -> torch.Tensor:
        if rank == self._rank:
            return self._under_way[addend.reduction - self._under_way[0].number].tensor[start:stop]
        dtype = DTYPES[addend.dtype]
        segment = self._segments[rank, addend.segment]
        return segments.tensor_over(segment, dtype, stop - start, addend.offset_bytes + start * dtype.itemsize)

    def _land(self) -> None:
        """Let go of who waits for what is done, or will never be done."""
        while self._under_way and self._ledger.is_done(self._under_way[0].number):
            self._under_way.popleft().land()
        for hearing in self._hearings.values():
            hearing.settle()
        failure = next(self._failures(), None)
        if failure is not None:
            self._fail(failure)

    def _failures(self) -> Iterator[str]:
        """Why something that is under way will never be done, or has taken too long."""
        if self._under_way:
            first = self._under_way[0]
            missing = self._ledger.missing(first.number)
            if (loss := self._ledger.lost(first.name, missing)) is not None:
                yield loss
            if time.monotonic() >= first.deadline:
                yield self._ledger.overdue(first.number, self._timeout_s)
        for source, hearing in self._hearings.items():
            if hearing.listening:
                if (loss := self._ledger.lost(hearing.listening[0].name, [source])) is not None:
                    yield loss
                if time.monotonic() >= hearing.listening[0].deadline:
                    yield self._ledger.untold(hearing.listening[0].name, source, self._timeout_s)

    def _fail(self, error: str, farewell: str | None = None) -> None:
        """What is under way fails, and all that follows. The first time, the peers are told why."""
        if self._failure is None:
            self._failure = error
            self._take_leave(error if farewell is None else farewell)
        for collectives in self._queues():
            while collectives:
                collectives.popleft().land(self._failure)

    def _queues(self) -> Iterator[deque[Any]]:
        """Collectives that have not landed, in order."""
        yield self._under_way
        for hearing in self._hearings.values():
            yield hearing.listening

    # ------------------------------------------------------------------ hearing and telling

    def _limit_ms(self, limit_s: float) -> float | None:
        """How long to sleep, at most: also until the first time limit passes."""
        for collectives in self._queues():
            with suppress(IndexError):  # nothing is under way
                limit_s = min(limit_s, collectives[0].deadline - time.monotonic())
        return None if limit_s == float("inf") else max(limit_s, 0) * 1000

    def _listen(self) -> None:
        self._on_event[self._from_self.fileno()] = partial(self._receive, self._rank, self._from_self)
        for rank, peer in self._peers.items():
            self._on_event[peer.socket.fileno()] = partial(self._receive, rank, peer.socket)
            if peer.process is not None:
                self._on_event[peer.process] = partial(self._on_process_end, rank)
        for descriptor in self._on_event:
            self._watch(descriptor, select.POLLIN)

    def _watch(self, descriptor: int, events: int) -> None:
        for poll in self._polls:
            poll.register(descriptor, events)

    def _receive(self, rank: int, connection: socket.socket) -> bool:
        """Take in one message; whether there was one."""
        try:
            message, descriptors = messages.receive(connection)
        except BlockingIOError:
            self._tell_peers()  # what has happened is that there is room again
            return False
        match message:
            case Addend():
                self._ledger.note_addend(rank, message)
            case ChunksDone():
                self._ledger.num_done[rank] = message.total
            case Told():
                self._hearings[rank].told.append(message)
            case Nudge():
                pass
            case SegmentMade():
                self._segments[rank, message.number] = segments.attach(descriptors[0], message.nbytes)
            case SegmentDropped():
                del self._segments[rank, message.number]
            case Farewell():
                self._ledger.left[rank] = message.reason
            case None if rank == self._rank:
                self.is_closed = True
            case None:
                self._lose(rank)
        return message is not None

    def _on_process_end(self, rank: int) -> None:
        """Take in what it has said before, then count it as gone."""
        while self._receive(rank, self._peers[rank].socket):
            pass
        self._lose(rank)

    def _lose(self, rank: int) -> None:
        self._ledger.note_silence(rank)
        self._stop_listening_to(rank)

    def _stop_listening_to(self, rank: int) -> None:
        for descriptor in (self._peers[rank].socket.fileno(), self._peers[rank].process):
            if descriptor in self._on_event:
                del self._on_event[descriptor]
                for poll in self._polls:
                    poll.unregister(descriptor)

    def _tell_peers(self) -> None:
        """How many of our chunks are done, to all who do not know yet."""
        ours = ChunksDone(self._ledger.num_done[self._rank])
        for rank, peer in self._peers.items():
            if self._num_told[rank] == ours.total or peer.socket.fileno() not in self._on_event:
                continue
            if messages.send(peer.socket, messages.encode(ours)):
                self._num_told[rank] = ours.total
            has_told = self._num_told[rank] == ours.total
            self._watch(peer.socket.fileno(), select.POLLIN if has_told else select.POLLIN | select.POLLOUT)

    def _take_leave(self, reason: str) -> None:
        """Say farewell, and listen to nobody but ourselves any more."""
        farewell = messages.encode(Farewell(reason))
        for rank, peer in self._peers.items():
            messages.send(peer.socket, farewell)
            self._stop_listening_to(rank)
