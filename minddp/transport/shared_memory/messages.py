"""The messages between the ranks of one host: a few bytes, or a small broadcast. Gradients are never sent.

The sockets are of type SOCK_SEQPACKET: each message arrives whole and in order, or not at all.
"""

from __future__ import annotations

import array
import pickle
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch

DTYPES = (  # those that can be added in shared memory; in messages a dtype is its index
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
MAX_BROADCAST_BYTES = 64 * 1024  # a socket holds about three times as much
MAX_REASON_CHARACTERS = 1023  # longer ones are cut
MAX_MESSAGE_BYTES = MAX_BROADCAST_BYTES + 1024


class SegmentMade(NamedTuple):
    """The sender has a new segment; its descriptor is attached to the message."""

    number: int
    nbytes: int


class SegmentDropped(NamedTuple):
    """The sender has unmapped one of its segments and will not refer to it again."""

    number: int


class AddendReady(NamedTuple):
    """The sender's addend of its all-reduce number `reduction` is there, and does not change until that is done."""

    reduction: int
    segment: int
    offset_bytes: int
    numel: int
    dtype: int

    def __str__(self) -> str:
        return f"{self.numel:,} elements of {DTYPES[self.dtype]}"


class ChunksDone(NamedTuple):
    """The sender has written its chunks of its first `total` all-reduces into the memory of all ranks."""

    total: int


class Broadcast(NamedTuple):
    """A tensor's bytes, at most `MAX_BROADCAST_BYTES`, sent after the sender has launched so many all-reduces."""

    num_launched: int
    content: bytes


class WakeUp(NamedTuple):
    """From a rank to itself: something may have changed."""


class Leaving(NamedTuple):
    """The sender takes part in no further collective, for this reason; empty if nothing went wrong."""

    reason: str


Message = SegmentMade | SegmentDropped | AddendReady | ChunksDone | Broadcast | WakeUp | Leaving

_TYPES: tuple[type[Message], ...] = get_args(Message)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor with any strides, in the order of its indices."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


def encode(message: Message) -> bytes:
    return pickle.dumps((_TYPES.index(type(message)), *message))


def decode(encoded: bytes) -> Message:
    kind, *fields = pickle.loads(encoded)
    return _TYPES[kind](*fields)


def send(peer: socket.socket, encoded: bytes, descriptors: Sequence[int] = (), timeout_s: float = 0.0) -> bool:
    """True if sent within the time limit. True also if the peer has ended: that is noticed elsewhere."""
    # Not by `socket.send_fds`, which ignores its flags (in Python 3.11), and so may wait for ever.
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    while True:
        try:
            peer.sendmsg([encoded], attached, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not timeout_s or not wait_for_event(peer, select.POLLOUT, timeout_s):
                return False
        except ConnectionError:
            return True
        else:
            return True


def receive(peer: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message and its descriptors; `None` if the other end is closed.

    Raises:
        BlockingIOError: no message has arrived.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    room_for_descriptor = socket.CMSG_SPACE(struct.calcsize("i"))
    try:
        encoded, ancillary, _, _ = peer.recvmsg(MAX_MESSAGE_BYTES, room_for_descriptor, flags)
    except ConnectionResetError:  # raised once if the peer left messages of ours unread; its own messages follow
        encoded, ancillary, _, _ = peer.recvmsg(MAX_MESSAGE_BYTES, room_for_descriptor, flags)
    if not encoded:
        return None, []
    return decode(encoded), [fd for _, _, data in ancillary for fd in array.array("i", data)]


def wait_for_event(peer: socket.socket, event: int, timeout_s: float) -> bool:
    """Sleep until `event` (select.POLLIN, select.POLLOUT); True if it came within the time limit."""
    poll = select.poll()
    poll.register(peer, event)
    return bool(poll.poll(timeout_s * 1000))
