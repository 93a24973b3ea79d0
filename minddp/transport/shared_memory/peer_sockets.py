"""The sockets of one rank: one for each peer, and a pair for messages from its threads to the rank itself."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from minddp.transport.shared_memory import messages
from minddp.transport.shared_memory.messages import Ended, Message, WakeUp


class Peer(NamedTuple):
    """Another rank. `process` is a descriptor that becomes readable when its process ends, if there is one.

    The socket does so as well, unless a forked child of the process keeps it open.
    """

    socket: socket.socket
    process: int | None

    def close(self) -> None:
        self.socket.close()
        if self.process is not None:
            os.close(self.process)


class PeerSockets:
    """One thread at a time may `poll(limit_ms)` for events and `receive`; any thread may `sleep(limit_ms)`."""

    def __init__(self, rank: int, peers: Mapping[int, Peer], timeout_s: float):
        self._process = os.getpid()
        self._rank = rank
        self._peers = peers
        self._timeout_s = timeout_s
        self._to_self, self._from_self = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        # By descriptor of a socket or a process
        self._rank_of = {self._from_self.fileno(): rank}
        for number, peer in peers.items():
            self._rank_of[peer.socket.fileno()] = number
            if peer.process is not None:
                self._rank_of[peer.process] = number

        self._polls = (select.poll(), select.poll())  # two, because two threads cannot wait on one
        for poll in self._polls:
            for descriptor in self._rank_of:
                poll.register(descriptor, select.POLLIN)
        self.poll, self.sleep = (poll.poll for poll in self._polls)

    # ------------------------------------------------------------------ for any thread

    def send(self, message: Message, descriptors: Sequence[int] = (), also_to_self: bool = False) -> None:
        """Send to all peers; wait until there is room.

        Raises:
            RuntimeError: a peer has not received its messages within the time limit.
        """
        connections = [peer.socket for peer in self._peers.values()]
        for connection in [*connections, self._to_self] if also_to_self else connections:
            if not messages.send(connection, message, descriptors, timeout_s=self._timeout_s):
                raise RuntimeError(
                    f"A rank has not received its messages for {self._timeout_s:g} s. Its process may be stopped: "
                    f"let it continue, or start all ranks again."
                )

    def wake(self) -> None:
        """End `poll` and `sleep`. Does nothing if the rank has messages to read, or the sockets are closed."""
        with suppress(OSError):
            messages.send(self._to_self, WakeUp())

    def shut_down(self) -> None:
        """Send `Ended` to this rank itself. No effect in a forked child, which has copies of the sockets."""
        if os.getpid() == self._process:
            with suppress(OSError):  # closed before
                self._to_self.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------ for one thread at a time

    def receive(self, events: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Message, list[int]]]:
        """The messages of each rank with an event, and their descriptors. A rank's last message is `Ended`."""
        for descriptor, _ in events:
            if descriptor not in self._rank_of:  # disconnected by an earlier event
                continue
            rank = self._rank_of[descriptor]
            connection = self._from_self if rank == self._rank else self._peers[rank].socket
            for message, attached in messages.receive(connection):
                yield rank, message, attached
            if descriptor in self._rank_of and descriptor != connection.fileno():  # the process has ended
                yield rank, Ended(), []

    def try_to_send(self, rank: int, message: Message) -> bool:
        """False if there is no room now. Then the next `poll` also ends when there is room."""
        connection = self._peers[rank].socket
        if connection.fileno() not in self._rank_of:
            return True  # it has ended
        is_sent = messages.send(connection, message)
        for poll in self._polls:
            poll.modify(connection, select.POLLIN if is_sent else select.POLLIN | select.POLLOUT)
        return is_sent

    def disconnect(self, rank: int) -> None:
        """Receive no more from a peer."""
        for descriptor in (self._peers[rank].socket.fileno(), self._peers[rank].process):
            if descriptor in self._rank_of:
                del self._rank_of[descriptor]
                for poll in self._polls:
                    poll.unregister(descriptor)

    def close(self) -> None:
        self._to_self.close()
        self._from_self.close()
        for peer in self._peers.values():
            peer.close()
