"""The exchange in a host's memory, with a way out: what has been added up crosses before it is spread.

[Note: pieces]
A chunk is cut into pieces of at most `PIECE_BYTES`. While one crosses, the next is added up behind it and the one
before it is spread: the wire, which is the slowest of the three, does not wait for the other two except for the
first piece and the last. Two pieces are under way at a time, as gloo has two threads for it; the others queue up.
Each lane sends its pieces in the same order on every host, since all ranks launch in the same order.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from minddp.transport.hierarchical.lane import Crossing, Lane, LaneBroken
from minddp.transport.shared_memory.exchange import Exchange
from minddp.transport.shared_memory.ledger import SAME_CALLS, Ledger
from minddp.transport.shared_memory.messages import DTYPES, Addend
from minddp.transport.shared_memory.order import BLOCK_NUMEL, chunk_bounds, route
from minddp.transport.shared_memory.rendezvous import Peer

PIECE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Piece:
    """A part of our chunk on its way: `everyones[s]` is where it lies in the bucket of the host's rank number s."""

    everyones: Sequence[torch.Tensor]
    crossing: Crossing


class HostExchange(Exchange):
    """One rank's part in all-reduces between hosts.

    `names` are the ranks of this host, as they are called in the whole group; `lane` is our end of one, if we have
    one. See [Note: add up, cross, spread].
    """

    patience_s = 0.001  # the network shall be busy while backward computes

    def __init__(
        self,
        seat: int,
        peers: Mapping[int, Peer],
        timeout_s: float,
        names: Sequence[int],
        lane: Lane | None,
        num_lanes: int,
    ):
        super().__init__(seat, peers, timeout_s, names)
        self._ledger = HostLedger(seat, len(names), names)
        self._lane = lane
        self._num_lanes = num_lanes
        self._crossing: deque[deque[Piece]] = deque()  # for each all-reduce that is added up, but not yet spread
        self._arrivals, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._on_event[self._arrivals.fileno()] = self._hear_bell
        self._watch(self._arrivals.fileno(), select.POLLIN)

    def leave(self) -> None:
        super().leave()
        if self._lane is not None:
            self._lane.abandon()
        self._arrivals.close()
        self._bell.close()

    # ------------------------------------------------------------------ for one thread at a time

    def _add_up(self) -> None:
        """Send off what is in, and spread what has arrived."""
        while (addends := self._ledger.next_to_add_up(ahead=len(self._crossing))) is not None:
            self._crossing.append(deque(self._send_off(addends)))
        try:
            while self._crossing and self._has_arrived(self._crossing[0]):
                self._crossing.popleft()
                self._ledger.note_added_up()
                self._tell_peers()
        except LaneBroken as error:
            self._fail(str(error))

    def _send_off(self, addends: Sequence[Addend]) -> Iterator[Piece]:
        """Add up our chunk, piece by piece, and let each cross."""
        if self._lane is None:
            return
        numel, itemsize = addends[0].numel, DTYPES[addends[0].dtype].itemsize
        bounds = chunk_bounds(self._rank, self._num_lanes, numel, itemsize)
        for start, stop in pieces_of(*bounds, itemsize):
            everyones = [self._chunk(seat, addend, start, stop) for seat, addend in enumerate(addends)]
            add_up(everyones, self._rank)
            yield Piece(everyones, self._lane.all_reduce(everyones[self._rank], partial(_ring, self._bell)))

    def _has_arrived(self, pieces: deque[Piece]) -> bool:
        """Spread those pieces that have arrived; whether these were all."""
        while pieces and pieces[0].crossing.done():
            assert self._lane is not None, "without a lane there are no pieces"
            piece = pieces.popleft()
            self._lane.settle(piece.crossing)
            spread(piece.everyones, self._rank)
        return not pieces

    def _hear_bell(self) -> None:
        """Something has crossed; which, is seen later."""
        self._arrivals.recv(4096, socket.MSG_DONTWAIT)

    def _fail(self, error: str, farewell: str | None = None) -> None:
        super()._fail(error, farewell)
        self._crossing.clear()
        if self._lane is not None:
            self._lane.close()


class HostLedger(Ledger):
    """What a rank knows of its host's all-reduces. What it waits for may be on another one."""

    def overdue(self, reduction: int, timeout_s: float) -> str:
        if not all(self._has_begun(seat, reduction) for seat in range(len(self.names))):
            return super().overdue(reduction, timeout_s)
        begun_here = self._ranks(range(len(self.names)), "has begun it", "have begun it")
        return (
            f"All-reduce {reduction} was not done within {timeout_s:g} s. {begun_here}, all that this host has; so "
            f"a rank on another host has not, or is stopped, or the network between them is stuck. {SAME_CALLS}"
        )


def pieces_of(start: int, stop: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """First and last-plus-one element of each piece of a chunk. See [Note: pieces]."""
    numel = PIECE_BYTES // itemsize
    for first in range(start, stop, numel):
        yield first, min(first + numel, stop)


def add_up(everyones: Sequence[torch.Tensor], owner: int) -> None:
    """Replace the tensor of rank `owner` by the sum of all; the others' are undefined afterwards.

    In the order of `route`: see [Note: the order of addition between hosts].
    """
    for blocks in _in_blocks(everyones):
        for arriving, here in pairwise(route(owner, len(everyones))):
            blocks[here].add_(blocks[arriving])


def spread(everyones: Sequence[torch.Tensor], owner: int) -> None:
    """Replace all tensors by that of rank `owner`."""
    for blocks in _in_blocks(everyones):
        for block in (*blocks[:owner], *blocks[owner + 1 :]):
            block.copy_(blocks[owner])


def _in_blocks(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.split(BLOCK_NUMEL) for tensor in tensors), strict=True)


def _ring(bell: socket.socket, _: Crossing) -> None:
    with suppress(OSError):  # it has been closed, or there is no room for one more: it will be heard anyway
        bell.send(b"!")
