"""Where the ranks' contributions lie: in the segments of this rank, and in those of its peers.

A contribution is the caller's tensor itself if that is in shared memory, or a copy in a *staging* segment. Staging
segments are reused. Peers map each segment once, and unmap it after its owner has dropped it and launched another
collective.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import torch

from minddp.transport.shared_memory import segments
from minddp.transport.shared_memory.control_block import Call, Counter
from minddp.transport.shared_memory.peer_sockets import PeerSockets, SegmentCreated, SegmentDropped
from minddp.transport.shared_memory.segments import Segment

if TYPE_CHECKING:
    from minddp.transport.shared_memory.progress_engine import Collective

MESSAGE_LIMIT_S = 10.0  # for a peer to receive a message
NOTHING = torch.empty(0)


class Contribution(NamedTuple):
    """Where a rank's contribution lies in its shared memory, and the call that says so."""

    call: Call
    tensor: torch.Tensor  # flat
    is_callers: bool  # it is the caller's tensor itself, not a copy


class OwnMemory:
    """The segments of this rank. One thread at a time."""

    def __init__(self, name: int, peers: PeerSockets, done: Counter):
        self._name = name
        self._peers = peers
        self._done = done
        self._by_address: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
        self._num_created = 0
        self._dropped: deque[int] = deque()  # numbers of freed segments that the peers have not unmapped yet
        self._staging: list[tuple[Segment, Collective]] = []  # with the collective that used it last

    def create(self, nbytes: int) -> Segment:
        """A new segment, which the peers map.

        Raises:
            RuntimeError: there is not enough memory, or a peer does not receive its messages.
        """
        with ExitStack() as until_sent:
            try:
                descriptor = segments.create(nbytes)
                until_sent.callback(os.close, descriptor)
                segment = segments.attach(descriptor, nbytes, self._num_created)
            except OSError as error:
                raise RuntimeError(
                    f"Rank {self._name} has no room for {nbytes:,} bytes of shared memory: {error}. Give the job "
                    f'more memory, or use gloo alone: backend="gloo", and transport="process_group".'
                ) from error
            self._num_created += 1
            self._peers.send(SegmentCreated(segment.number, nbytes), [descriptor], limit_s=MESSAGE_LIMIT_S)
        self._by_address[torch.frombuffer(segment, dtype=torch.uint8).data_ptr()] = segment
        weakref.finalize(segment, self._dropped.append, segment.number)
        return segment

    def announce_dropped(self, limit_s: float) -> None:
        """Have the peers unmap the segments that this rank has freed."""
        while self._dropped:
            self._peers.send(SegmentDropped(self._dropped.popleft()), limit_s=limit_s)

    def contribute(self, call: Call, user: Collective, tensor: torch.Tensor | None, in_place: bool) -> Contribution:
        """Where the contribution `tensor` lies. A copy is not filled yet."""
        if tensor is None:
            return Contribution(call, NOTHING, True)
        address = tensor.untyped_storage().data_ptr()
        if in_place and (segment := self._by_address.get(address)) is not None:
            call = call._replace(segment=segment.number, offset_bytes=tensor.data_ptr() - address)
            return Contribution(call, tensor, True)
        segment = self._staging_segment(user, tensor.nbytes)
        with torch.inference_mode(False):  # so that the progress thread may write to it
            copy = segment.tensor(tensor.dtype, tensor.numel())
        return Contribution(call._replace(segment=segment.number), copy, False)

    def _staging_segment(self, user: Collective, nbytes: int) -> Segment:
        """A segment that no collective uses any more, on any rank, or a new one.

        On this rank `is_done` says so: it may have to copy the result once all the others are done.
        """
        for index, (segment, last) in enumerate(self._staging):
            if len(segment) >= nbytes and last.is_done and self._done.all_reach(last.number + 1):
                del self._staging[index]
                break
        else:
            segment = self.create(segments.staging_bytes(nbytes))
        self._staging.append((segment, user))
        return segment


class PeerMemory:
    """The segments of the other ranks that are mapped here. One thread at a time."""

    def __init__(self) -> None:
        self._segments: dict[tuple[int, int], Segment] = {}  # by rank and number

    def has(self, rank: int, number: int) -> bool:
        return (rank, number) in self._segments

    def map(self, rank: int, message: SegmentCreated, descriptors: Sequence[int]) -> None:
        """Map a segment. Raises an OSError or a ValueError if its descriptor has not come or cannot be mapped."""
        if not descriptors:
            raise OSError("too many files are open (raise the limit: ulimit -n)")
        try:
            self._segments[rank, message.number] = segments.attach(descriptors[0], message.nbytes, message.number)
        finally:
            os.close(descriptors[0])

    def unmap(self, rank: int, number: int) -> None:
        """Once no tensor over it is left."""
        self._segments.pop((rank, number), None)

    def tensor(self, rank: int, call: Call, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the contribution that `call` of that rank describes."""
        segment = self._segments[rank, call.segment]
        return segment.tensor(call.dtype, stop - start, call.offset_bytes + start * call.dtype.itemsize)
