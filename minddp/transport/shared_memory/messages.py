"""The messages between the ranks of one host, some bytes each. Gradients are never sent.

Sockets are of type SOCK_SEQPACKET: each message arrives whole and in order, or not at all.
"""

from __future__ import annotations

import array
import pickle
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

MAX_REASON_CHARACTERS = 1023  # longer ones are cut
MAX_MESSAGE_BYTES = 8 * 1024


class SegmentCreated(NamedTuple):
    """The sender has created a segment. The descriptor is attached to the message."""

    number: int
    nbytes: int


class SegmentDropped(NamedTuple):
    """The sender has unmapped one of its segments and will not refer to it again."""

    number: int


class AddendReady(NamedTuple):
    """The sender's addend of its all-reduce `reduction` is complete, and does not change until that is done."""

    reduction: int
    segment: int
    offset_bytes: int
    numel: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.numel:,} elements of {self.dtype}"


class ChunksDone(NamedTuple):
    """The sender has written its chunks of the first `total` all-reduces into the memory of all ranks."""

    total: int


class WakeUp(NamedTuple):
    """From a rank to itself: `make_progress` may have something to do."""


class Leaving(NamedTuple):
    """The sender joins no further all-reduce. `reason` is empty if there was no error."""

    reason: str


class Ended(NamedTuple):
    """Not sent: the process at the other end has ended, or has closed the socket."""


Message = SegmentCreated | SegmentDropped | AddendReady | ChunksDone | WakeUp | Leaving | Ended


def send(peer: socket.socket, message: Message, descriptors: Sequence[int] = (), timeout_s: float = 0.0) -> bool:
    """False if there was no room within the time limit. If the peer has ended, the message is dropped."""
    # Not `socket.send_fds`: in Python 3.11 it ignores its flags, and may block.
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    encoded = pickle.dumps(message)
    while True:
        try:
            peer.sendmsg([encoded], attached, socket.MSG_DONTWAIT)
        except BlockingIOError:
            poll = select.poll()
            poll.register(peer, select.POLLOUT)
            if not poll.poll(timeout_s * 1000):
                return False
        except ConnectionError:
            return True
        else:
            return True


def receive(peer: socket.socket) -> Iterator[tuple[Message, list[int]]]:
    """All messages that have come, with their descriptors. Does not wait. The last may be `Ended`."""
    room_for_descriptor = socket.CMSG_SPACE(struct.calcsize("i"))
    while True:
        try:
            encoded, ancillary, _, _ = peer.recvmsg(
                MAX_MESSAGE_BYTES, room_for_descriptor, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except ConnectionResetError:  # raised once if the peer has not read all messages; its own ones follow
            continue
        if not encoded:
            yield Ended(), []
            return
        yield pickle.loads(encoded), [fd for _, _, data in ancillary for fd in array.array("i", data)]
