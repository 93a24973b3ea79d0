"""The progress engine of one rank: begins its collectives in order, advances them, and fails them together.

A collective in flight is a generator (`collectives.py`) that waits for a counter. Whichever thread has the turn
(`host_communicator.py`) calls `advance`, which takes every step that is possible.

When a process ends, by whatever signal, its descriptor wakes all peers. A rank that leaves gives its reason. A rank
that is merely slow has until the time limit of the collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from minddp.platform import wording
from minddp.transport.shared_memory.contributions import Contribution, OwnMemory, PeerMemory
from minddp.transport.shared_memory.control_block import NUM_CALLS, Call, ControlBlock, Counter
from minddp.transport.shared_memory.peer_sockets import (
    Ended,
    Leaving,
    PeerSockets,
    SegmentCreated,
    SegmentDropped,
)

if TYPE_CHECKING:
    from minddp.transport.hierarchical import Lane

SAME_CALLS = "All ranks must make the same calls in the same order."
AFTER_DEADLINE_S = 10.0  # a chunk between hosts may last longer
FOREVER = float("inf")


class Awaited(Protocol):
    """A condition that collective `number - 1` waits for: of a counter, or of a chunk on its way between hosts."""

    def all_reach(self, number: int) -> bool: ...

    def behind(self, number: int) -> list[int]:
        """The ranks of this host that it waits for."""


class Earlier(NamedTuple):
    """Collectives of this rank that a barrier waits for."""

    collectives: Sequence[Collective]

    def all_reach(self, number: int) -> bool:
        return all(collective.has_begun and collective.waits_for is None for collective in self.collectives)

    def behind(self, number: int) -> list[int]:
        """Empty: an earlier collective that cannot be done is in front, and reported itself."""
        return []


class PeerFailed(Exception):
    """The reason why another rank has failed."""


class Collective:
    """A collective in flight. Once `is_done`, `error` is its error, if it has one."""

    def __init__(self, number: int, call: Call, limit_s: float, is_inference: bool):
        self.number = number
        self.call = call
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        self.steps: Any = None
        self.has_begun = False
        self.waits_for: Awaited | None = None  # until that reaches `until`
        self.until = number - NUM_CALLS + 1  # it begins once its place in the control block is free
        self.is_inference = is_inference  # tensors of `torch.inference_mode` are written
        self.is_urgent = False  # the progress thread skips its delay
        self.is_done = False
        self.error: str | None = None
        self.keeps: object = None  # the communicator: while it is in flight, a dropped one is not closed
        self.when_done: list[Callable[[Collective], object]] | None = []  # `None` once they have been called

    def __str__(self) -> str:
        return f"{self.call.kind.name.lower()} {self.number}"


class ProgressEngine:
    """The collectives of rank `rank` of the host. Ranks are numbered from 0 here; `names` are those for messages.

    Any thread may call `add`, one at a time, and look (`in_flight`, `can_advance`, `limit_ms`). The rest is for the
    thread that has the turn.
    """

    def __init__(
        self,
        rank: int,
        peers: PeerSockets,
        control: ControlBlock,
        names: Sequence[int],
        lane: Lane | None,
    ):
        self.rank = rank
        self.num_ranks = len(names)
        self.lane = lane
        self.peers = peers
        self.control = control
        self._names = names
        self.wake_self = peers.wake_self  # a thread of this rank, which then looks if it can advance
        self.begun, self.done = control.begun, control.done
        self.own_memory = OwnMemory(names[rank], peers, self.done)
        self._peer_memory = PeerMemory()

        # Collectives of this rank
        self.num_launched = 0
        self._in_flight: dict[int, Collective] = {}  # by number, in order
        self._num_done = 0
        self._done_early: set[int] = set()  # numbers above `_num_done`
        self.failure: str | None = None  # the error of every collective from now on
        self.ended: dict[int, Leaving | Ended] = {}  # ranks that join no further collective

    # ------------------------------------------------------------------ collectives in flight

    def in_flight(self) -> list[Collective]:
        """In order, for any thread."""
        return list(self._in_flight.values())

    def add(
        self,
        collective: Collective,
        steps: Callable[..., Any],
        contribution: torch.Tensor | None,
        arguments: Sequence[Any],
        in_place: bool,
    ) -> Contribution:
        """Add the next collective, `steps(self, number, ours, *arguments)`, and return `ours`. It has not begun."""
        try:
            if self.failure is not None:  # it will not begin, and the peers do not read messages any more
                contribution = None
            else:
                self.own_memory.announce_dropped(collective.limit_s)
            ours = self.own_memory.contribute(collective.call, collective, contribution, in_place)
        except RuntimeError as error:  # the peers wait for this collective
            self.fail(str(error))
            raise
        collective.steps, collective.waits_for = steps(self, collective.number, ours, *arguments), self.done
        self._in_flight[collective.number] = collective
        self.num_launched += 1
        return ours

    def advance(self, only_begin: bool = False) -> list[Collective]:
        """Take every step that is possible now. Returns the collectives that are done."""
        finished: list[Collective] = []
        blocked: Awaited | None = None  # a counter reaches the numbers of those that have begun in order
        try:
            for collective in self.in_flight():
                if collective.has_begun and (only_begin or collective.waits_for is blocked is not None):
                    continue
                if self.failure is None and self._step(collective, only_begin):
                    finished.append(collective)
                blocked = collective.waits_for
                if not collective.has_begun:
                    break  # the later ones begin after it
                if collective.waits_for is self.begun:
                    only_begin = True  # those of a lane must be called in one order on all its ranks
        except PeerFailed as failure:
            self.fail(str(failure))
        except BaseException as error:  # half a result is useless, and a second attempt would add twice
            reason = error if isinstance(error, RuntimeError) else repr(error)
            self.fail(f"Rank {self._names[self.rank]} cannot continue its collectives: {reason}")
            if not isinstance(error, Exception):
                raise
        if self.failure is not None:
            for collective in self.in_flight():
                if collective not in finished:
                    collective.error = self.failure
                    finished.append(collective)
        for collective in finished:
            collective.steps, collective.keeps, collective.is_done = None, None, True
            del self._in_flight[collective.number]
        return finished

    def _step(self, collective: Collective, only_begin: bool) -> bool:
        """True if the collective is done."""
        while (waits_for := collective.waits_for) is not None and waits_for.all_reach(collective.until):
            if waits_for is self.begun:
                self._require_same_call(collective.number)
                self._require_no_failure(collective.number)  # this rank may write into the memory of the others
            if collective.is_inference:
                with torch.inference_mode():  # each thread has a mode of its own
                    collective.waits_for = next(collective.steps, None)
            else:
                collective.waits_for = next(collective.steps, None)
            collective.has_begun, collective.until = True, collective.number + 1
            if only_begin:
                break
        return collective.waits_for is None

    def can_advance(self) -> bool:
        """True if `advance` would take a step."""
        blocked = None
        for collective in self.in_flight():
            waits_for = collective.waits_for
            if collective.has_begun and waits_for is blocked is not None:
                continue
            if waits_for is None or waits_for.all_reach(collective.until):  # `None`: another thread completes it
                return True
            blocked = waits_for
            if not collective.has_begun:
                break
        return False

    def limit_ms(self, limit_s: float) -> float | None:
        """The time to sleep in milliseconds: at most `limit_s`, and until the first deadline."""
        for first in self.in_flight()[:1]:
            left_s = first.deadline - time.monotonic()
            limit_s = min(limit_s, left_s if left_s > 0 else AFTER_DEADLINE_S)
        return None if limit_s == FOREVER else max(limit_s, 0) * 1000

    # ------------------------------------------------------------------ for a collective

    def begin(self, number: int, ours: Contribution) -> Counter:
        """This rank's contribution is complete."""
        self.control.write_call(number, ours.call)
        self.begun.raise_to(number + 1)
        self._wake()
        return self.begun

    def contributions(self, number: int, ours: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
        """Elements `start` to `stop` of the contribution of each rank; this rank's own are those of `ours`."""
        return [
            ours[start:stop] if rank == self.rank else self.contribution(number, rank, start, stop)
            for rank in range(self.num_ranks)
        ]

    def contribution(self, number: int, rank: int, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the contribution of another rank."""
        call = self.control.call_of(rank, number)
        if not self._peer_memory.has(rank, call.segment):  # its message came before the call
            self.receive()
        return self._peer_memory.tensor(rank, call, start, stop)

    def finish(self, number: int) -> None:
        """This rank no longer accesses the memory of the others. The counter is raised in the order of numbers.

        Raises:
            PeerFailed: a rank has failed before this collective was done there. Its memory, which this rank has
                read, may have been in use again.
        """
        self._require_no_failure(number)
        self._done_early.add(number)
        while self._num_done in self._done_early:
            self._done_early.remove(self._num_done)
            self._num_done += 1
        self.done.raise_to(self._num_done)
        self._wake()

    def _wake(self) -> None:
        if asleep := self.control.to_wake():
            self.peers.wake(asleep)

    def earlier(self, number: int) -> Earlier:
        """The collectives of this rank before `number` that are in flight."""
        return Earlier([other for other in self.in_flight() if other.number < number])

    # ------------------------------------------------------------------ messages and failures

    def receive(self, limit_ms: float | None = 0) -> None:
        """Handle the messages of the peers, after a sleep of at most so long if there are none."""
        for rank, message, descriptors in self.peers.receive(self.peers.poll(limit_ms)):
            match message:
                case SegmentCreated():
                    try:
                        self._peer_memory.map(rank, message, descriptors)
                    except (OSError, ValueError) as reason:
                        ours, theirs = self._names[self.rank], self._names[rank]
                        self.fail(f"Rank {ours} cannot map memory of rank {theirs}: {reason}")
                case SegmentDropped():
                    self._peer_memory.unmap(rank, message.number)
                case Leaving() | Ended():
                    self.ended.setdefault(rank, message)
                    self.peers.disconnect(rank)

    def fail(self, error: str, reason_for_peers: str | None = None) -> None:
        """Every collective in flight, and every later one, has this error. The peers receive the first reason."""
        if self.failure is None:
            self.failure = error
            try:
                self.peers.leave(error if reason_for_peers is None else reason_for_peers)
            finally:
                if reason_for_peers is None or self._in_flight:
                    self.control.fail_from(min(list(self._in_flight), default=self.num_launched))
                self.wake_self()  # a thread that waits for one of them
                if self.lane is not None:
                    self.lane.close(0.0)

    def fail_if_hopeless(self) -> None:
        """Fail if the first collective can never be done."""
        first = next(iter(self.in_flight()), None)
        if first is None or first.waits_for is None:
            return
        behind = first.waits_for.behind(first.until)
        for rank in behind:
            if rank in self.ended:
                self.fail(_reason(self._names[rank], self.ended[rank], str(first)))
                return
        if time.monotonic() < first.deadline or not behind or not isinstance(first.waits_for, Counter):
            return
        late = wording.subject([self._names[rank] for rank in behind], "has", "have")
        if not first.has_begun:
            self.fail(
                f"{late} still to finish collective {first.until - 1}, {NUM_CALLS} before {first}, after "
                f"{first.limit_s:g} s. {SAME_CALLS}"
            )
        elif first.waits_for is self.begun:
            self.fail(f"{late} not begun {first} within the timeout of {first.limit_s:g} s. {SAME_CALLS}")
        else:
            self.fail(
                f"{late} begun {first} and not finished it within the timeout of {first.limit_s:g} s: a process is "
                f"stopped, or waits for another host."
            )

    def _require_no_failure(self, number: int) -> None:
        for rank in self.control.failed_before(number + 1):
            self.receive()  # its message came before
            # The message is lost if this rank was stopped and had no room for it.
            name = self._names[rank]
            unread = Leaving(f"Rank {name} has failed before collective {number}. Its output shows why.")
            raise PeerFailed(_reason(name, self.ended.get(rank, unread), f"collective {number}"))

    def _require_same_call(self, number: int) -> None:
        if (ranks := self.control.first_difference(number)) is not None:
            calls = [f"rank {self._names[rank]} calls {self.control.call_of(rank, number)}" for rank in ranks]
            raise RuntimeError(f"In collective {number} {', but '.join(calls)}. {SAME_CALLS}")


def _reason(name: int, last_message: Leaving | Ended, collective: str) -> str:
    """Why a collective cannot be done, from the last message of rank `name`."""
    match last_message:
        case Ended():
            return (
                f"Rank {name} has ended before {collective} was done: its process has exited or was killed. Its "
                f"output or exit code shows why (a crash, out of memory, a signal). Start all ranks again."
            )
        case Leaving(""):
            return (
                f"Rank {name} has left before {collective} was done: the process has ended, or its process group "
                f"was destroyed. {SAME_CALLS}"
            )
        case Leaving(reason):  # the failure of that rank, or one that it has heard of
            return reason
