"""What ranks say to each other, through a socket: a few bytes, or a small broadcast. Gradients are never sent.

Sockets are of type SOCK_SEQPACKET: each message arrives as a whole, in order, or not at all.
"""

from __future__ import annotations

import array
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

DTYPES = (  # what can be added up in shared memory; a dtype travels as its index
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
LARGEST_TOLD_BYTES = 64 * 1024  # a socket holds about three times as much


class SegmentMade(NamedTuple):
    """The sender has a new segment; its descriptor comes along."""

    number: int
    nbytes: int


class SegmentDropped(NamedTuple):
    """The sender has unmapped one of its segments and will not mention it again."""

    number: int


class Addend(NamedTuple):
    """The sender's gradients for its all-reduce number `reduction` are in, and lie there."""

    reduction: int
    segment: int
    offset_bytes: int
    numel: int
    dtype: int

    def __str__(self) -> str:
        return f"{self.numel:,} elements of {DTYPES[self.dtype]}"


class ChunksDone(NamedTuple):
    """The sender has done its chunks of its first `total` all-reduces."""

    total: int


class Told(NamedTuple):
    """What the sender broadcasts, at most `LARGEST_TOLD_BYTES`, after it has launched so many all-reduces."""

    num_launched: int
    content: bytes


class Nudge(NamedTuple):
    """To oneself: see what there is to do."""


class Farewell(NamedTuple):
    """The sender takes no further part, for this reason; an empty one if it is done."""

    reason: str


Message = SegmentMade | SegmentDropped | Addend | ChunksDone | Told | Nudge | Farewell

_TYPES: tuple[type[Message], ...] = (SegmentMade, SegmentDropped, Addend, ChunksDone, Told, Nudge, Farewell)
_CODES = {kind: (code, struct.Struct(f"<B{len(kind._fields)}q")) for code, kind in enumerate(_TYPES)}
_TOLD = struct.Struct("<Bq")  # and then its content
_LONGEST_REASON_BYTES = 1023  # what is longer is cut


def encode(message: Message) -> bytes:
    code, layout = _CODES[type(message)]
    if isinstance(message, Farewell):
        return bytes([code]) + message.reason.encode()[:_LONGEST_REASON_BYTES]
    if isinstance(message, Told):
        return _TOLD.pack(code, message.num_launched) + message.content
    return layout.pack(code, *message)


def decode(encoded: bytes) -> Message:
    kind = _TYPES[encoded[0]]
    if kind is Farewell:
        return Farewell(encoded[1:].decode(errors="ignore"))  # a character may have been cut in two
    if kind is Told:
        _, num_launched = _TOLD.unpack_from(encoded)
        return Told(num_launched, encoded[_TOLD.size :])
    return kind(*_CODES[kind][1].unpack(encoded)[1:])


def send(peer: socket.socket, encoded: bytes, descriptors: Sequence[int] = (), timeout_s: float = 0.0) -> bool:
    """Whether it was sent within the time limit. A peer that is gone counts as told: that is noticed elsewhere."""
    while True:
        try:
            if descriptors:
                socket.send_fds(peer, [encoded], descriptors, socket.MSG_DONTWAIT)
            else:
                peer.send(encoded, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not timeout_s or not await_event(peer, select.POLLOUT, timeout_s):
                return False
        except ConnectionError:
            return True
        else:
            return True


def receive(peer: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message and the descriptors that came with it; `None` if the other end is closed.

    Raises:
        BlockingIOError: nothing has arrived.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    room_for_descriptor = socket.CMSG_SPACE(struct.calcsize("i"))
    try:
        encoded, ancillary, _, _ = peer.recvmsg(_TOLD.size + LARGEST_TOLD_BYTES, room_for_descriptor, flags)
    except ConnectionResetError:  # said once, by one who left without having heard us out; its last words follow
        encoded, ancillary, _, _ = peer.recvmsg(_TOLD.size + LARGEST_TOLD_BYTES, room_for_descriptor, flags)
    if not encoded:
        return None, []
    return decode(encoded), [fd for _, _, data in ancillary for fd in array.array("i", data)]


def await_event(peer: socket.socket, event: int, timeout_s: float) -> bool:
    """Sleep until `event` (select.POLLIN, select.POLLOUT); whether it came within the time limit."""
    poll = select.poll()
    poll.register(peer, event)
    return bool(poll.poll(timeout_s * 1000))
