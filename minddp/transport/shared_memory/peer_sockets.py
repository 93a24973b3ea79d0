"""The sockets between the ranks of a host: they wake a sleeping rank, pass memory on, and notice that a rank ends.

Data, calls and counters are in memory; see [Note: control block]. Sockets are of type SOCK_SEQPACKET: each message
arrives whole and in order, or not at all. Ranks of a host are numbered from 0 here.
"""

from __future__ import annotations

import array
import errno
import os
import pickle
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

MAX_REASON_CHARACTERS = 1023  # longer ones are cut
MAX_MESSAGE_BYTES = 8 * 1024
FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL  # of all messages sent


class SegmentCreated(NamedTuple):
    """The sender has created a segment. Its descriptor is attached to the message."""

    number: int
    nbytes: int


class SegmentDropped(NamedTuple):
    """The sender has unmapped one of its segments and will not refer to it again."""

    number: int


class WakeUp(NamedTuple):
    """The sender has raised one of its counters."""


class Leaving(NamedTuple):
    """The sender joins no further collective. `reason` is empty if there was no error."""

    reason: str


class Ended(NamedTuple):
    """Not sent: the process at the other end has ended, or has closed the socket."""


Message = SegmentCreated | SegmentDropped | WakeUp | Leaving | Ended
WAKE_UP = pickle.dumps(WakeUp())


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
    """The other ranks. One thread at a time may `poll(limit_ms)`, `receive` and `disconnect`.

    Any thread may call the other methods, and `sleep(limit_ms)` until there is something to receive.
    """

    def __init__(self, peers: Mapping[int, Peer]):
        self._peers = peers
        self._to_self, self._from_self = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.is_closed = False

        # By descriptor of a socket or a process
        self._rank_of: dict[int, int | None] = {self._from_self.fileno(): None}
        for rank, peer in peers.items():
            self._rank_of[peer.socket.fileno()] = rank
            if peer.process is not None:
                self._rank_of[peer.process] = rank

        self._polls = (select.poll(), select.poll())  # two, because two threads cannot wait on one
        for poll in self._polls:
            for descriptor in self._rank_of:
                poll.register(descriptor, select.POLLIN)
        self.poll, self.sleep = (poll.poll for poll in self._polls)

    # ------------------------------------------------------------------ for any thread

    def wake(self, ranks: Sequence[int]) -> None:
        """End `poll` and `sleep` on `ranks`. A rank with a full socket has messages to read, so it is awake."""
        for rank in ranks:
            with suppress(OSError):
                self._peers[rank].socket.send(WAKE_UP, FLAGS)

    def wake_self(self) -> None:
        with suppress(OSError):
            self._to_self.send(WAKE_UP, FLAGS)

    def send(self, message: Message, descriptors: Sequence[int] = (), limit_s: float = 0.0) -> None:
        """Send to all peers; wait until there is room.

        Raises:
            RuntimeError: a peer has not received its messages within `limit_s` seconds.
        """
        for peer in self._peers.values():
            if not _send(peer.socket, message, descriptors, limit_s):
                raise RuntimeError(
                    f"A rank has not received its messages for {limit_s:g} s. Its process may be stopped: "
                    f"let it continue, or start all ranks again."
                )

    def shut_down(self) -> None:
        """Make `poll` and `sleep` return, with `is_closed`. Not for a forked child, which has copies."""
        self.is_closed = True
        with suppress(OSError):  # closed before
            self._to_self.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------ for one thread at a time

    def receive(self, events: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Message, list[int]]]:
        """The messages of each rank with an event, and their descriptors. A rank's last message is `Ended`."""
        for descriptor, _ in events:
            if descriptor not in self._rank_of:  # disconnected by an earlier event
                continue
            rank = self._rank_of[descriptor]
            if rank is None:
                for _ in _receive(self._from_self):
                    pass
                continue
            connection = self._peers[rank].socket
            for message, attached in _receive(connection):
                if not isinstance(message, WakeUp):
                    yield rank, message, attached
            if descriptor in self._rank_of and descriptor != connection.fileno():  # the process has ended
                yield rank, Ended(), []

    def disconnect(self, rank: int) -> None:
        """Receive no more from a peer."""
        for descriptor in (self._peers[rank].socket.fileno(), self._peers[rank].process):
            if descriptor is not None and self._rank_of.pop(descriptor, None) is not None:
                for poll in self._polls:
                    poll.unregister(descriptor)

    def leave(self, reason: str) -> None:
        """Tell all peers."""
        for peer in self._peers.values():
            _send(peer.socket, Leaving(reason[:MAX_REASON_CHARACTERS]))

    def close(self) -> None:
        self._to_self.close()
        self._from_self.close()
        for peer in self._peers.values():
            peer.close()


def connect(
    addresses: Mapping[int, tuple[bytes, str]],
    listener: socket.socket,
    ours: int,
    limit_s: float,
    peers: dict[int, Peer],
) -> None:
    """Connect to all lower ranks, and accept all higher ones, into `peers`. `addresses` are those of all ranks.

    Raises:
        OSError: a rank cannot be reached, or has not come within `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    for rank, (address, token) in addresses.items():
        if rank < ours:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(_seconds_until(deadline))
            connection.connect(address)
            connection.send(f"{token} {ours}".encode())
            peers[rank] = _peer(connection)
    our_token = addresses[ours][1].encode()
    while len(peers) < len(addresses) - 1:
        listener.settimeout(_seconds_until(deadline))
        connection, _ = listener.accept()
        connection.settimeout(_seconds_until(deadline))
        token_sent, _, rank_sent = connection.recv(100).partition(b" ")
        if secrets.compare_digest(token_sent, our_token):
            peers[int(rank_sent)] = _peer(connection)
        else:  # another process of this machine
            connection.close()


def _send(
    connection: socket.socket, message: Message, descriptors: Sequence[int] = (), limit_s: float = 0.0
) -> bool:
    """False if there was no room within the time limit. If the peer has ended, the message is dropped."""
    # Not `socket.send_fds`: in Python 3.11 it ignores its flags, and may block.
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    encoded = pickle.dumps(message)
    while True:
        try:
            connection.sendmsg([encoded], attached, FLAGS)
        except BlockingIOError:
            poll = select.poll()
            poll.register(connection, select.POLLOUT)
            if not poll.poll(limit_s * 1000):
                return False
        except OSError as error:
            if error.errno in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                raise RuntimeError(f"The system cannot pass memory to another rank: {error}") from error
            return True
        else:
            return True


def _receive(connection: socket.socket) -> Iterator[tuple[Message, list[int]]]:
    """All messages that have come, with their descriptors. Does not wait. The last may be `Ended`."""
    room_for_descriptor = socket.CMSG_SPACE(struct.calcsize("i"))
    while True:
        try:
            encoded, ancillary, _, _ = connection.recvmsg(
                MAX_MESSAGE_BYTES, room_for_descriptor, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except ConnectionResetError:  # raised once if the peer has not read all messages; its own ones follow
            continue
        except OSError:  # closed here
            return
        if not encoded:
            yield Ended(), []
            return
        yield pickle.loads(encoded), [fd for _, _, data in ancillary for fd in array.array("i", data)]


def _peer(connection: socket.socket) -> Peer:
    connection.settimeout(None)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, _, _ = struct.unpack("3i", credentials)
    try:
        return Peer(connection, os.pidfd_open(process))
    except (AttributeError, OSError):  # a system without such descriptors; a process in another container
        return Peer(connection, None)


def _seconds_until(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
