"""The messages between the ranks of one host: some bytes, or a small broadcast. Gradients are never sent.

Sockets are of type SOCK_SEQPACKET: each message arrives whole and in order, or not at all.
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

DTYPES = (  # of tensors that can be added in shared memory. A message contains the index of a dtype.
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
    dtype: int

    def __str__(self) -> str:
        return f"{self.numel:,} elements of {DTYPES[self.dtype]}"


class ChunksDone(NamedTuple):
    """The sender has written its chunks of the first `total` all-reduces into the memory of all ranks."""

    total: int


class Broadcast(NamedTuple):
    """A tensor's bytes, at most `MAX_BROADCAST_BYTES`, sent after the sender's first `num_launched` all-reduces."""

    num_launched: int
    content: bytes


class WakeUp(NamedTuple):
    """From a rank to itself: `make_progress` may have something to do."""


class Leaving(NamedTuple):
    """The sender joins no further collective. `reason` is empty if there was no error."""

    reason: str


Message = SegmentCreated | SegmentDropped | AddendReady | ChunksDone | Broadcast | WakeUp | Leaving

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
    """False if there was no room within the time limit. If the peer has ended, the message is dropped."""
    # Not `socket.send_fds`: in Python 3.11 it ignores its flags, and may block.
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
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


def receive(peer: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message and its descriptors; `None` if the other end is closed. BlockingIOError if none came."""
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    room_for_descriptor = socket.CMSG_SPACE(struct.calcsize("i"))
    try:
        encoded, ancillary, _, _ = peer.recvmsg(MAX_MESSAGE_BYTES, room_for_descriptor, flags)
    except ConnectionResetError:  # raised once if the peer has not read all messages; its own ones follow
        encoded, ancillary, _, _ = peer.recvmsg(MAX_MESSAGE_BYTES, room_for_descriptor, flags)
    if not encoded:
        return None, []
    return decode(encoded), [fd for _, _, data in ancillary for fd in array.array("i", data)]
