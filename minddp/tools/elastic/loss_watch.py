"""The thread of a member that notices lost members.

When a member is lost, the thread calls the generation off, so that all waits of the main thread end with an error.
See [Note: hanging up].
"""

from __future__ import annotations

import threading
from collections.abc import Collection

import psutil

from minddp.platform.repeating_thread import AT_EXIT_S, RepeatingThread
from minddp.platform.store import own_connection
from minddp.tools.elastic.connections import Connections
from minddp.tools.elastic.membership import Generation, Membership
from minddp.tools.watchdog import WatchedTransport
from minddp.transport.protocols import Transport

LOOK_EVERY_S = 0.1
STOPPED_LIMIT_S = 2.0
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class Term:
    """The membership of this process in one `generation`, until that is called off.

    The sockets that the process opens from construction until `connections.complete` belong to the generation.
    """

    def __init__(self, generation: Generation):
        self.generation = generation
        self.connections = Connections()
        self.transport: Transport | None = None  # once the group is made
        self.step = -1  # the step being computed
        self.is_over = threading.Event()  # a rank was lost, or others join

    def call_off(self, membership: Membership) -> None:
        """End the step on all members without counting it, and all waits. Any thread may call this, repeatedly."""
        number = self.generation.number
        self.is_over.set()  # before `step` is read: see Session._vote
        membership.settle(True, "over", number)
        membership.settle("again", "verdict", number, self.step)
        self.connections.hang_up()
        if isinstance(self.transport, WatchedTransport):
            self.transport.end_waits(f"Generation {number} was called off.")


class LossWatch:
    """Runs until `stop`. A member is lost if its process has ended, or has been stopped for `STOPPED_LIMIT_S`."""

    def __init__(self, membership: Membership):
        # Set by the main thread.
        self.term: Term | None = None
        self.watched: Collection[int] = ()  # members
        # Set by this thread.
        self.lost: frozenset[int] = frozenset()  # of those watched
        self.error: RuntimeError | None = None
        self._times_stopped: dict[int, int] = {}  # by member: in how many of the latest looks

        self._membership = Membership(own_connection(membership.store))
        self._thread = RepeatingThread(self._turn, LOOK_EVERY_S, "minddp/loss watch")

    def stop(self) -> None:
        self._thread.close(AT_EXIT_S)

    def check_store(self) -> None:
        """Raise RuntimeError if the store has ended."""
        if self.error is not None:
            raise RuntimeError("The store has ended, and with it the job.") from self.error

    def _turn(self, _is_last: bool) -> None:
        term = self.term
        try:
            self.lost = frozenset(member for member in self.watched if self._is_lost(member))
            if term is not None and self._must_end(term):
                term.call_off(self._membership)
        except RuntimeError as error:
            self.error = error
            if term is not None:
                term.is_over.set()
                term.connections.hang_up()
            raise

    def _is_lost(self, member: int) -> bool:
        try:
            status = psutil.Process(member).status()
        except psutil.NoSuchProcess:
            return True
        # Not by a clock: after a stop of the whole machine, other processes may continue later.
        times = self._times_stopped.get(member, 0) + 1 if status == psutil.STATUS_STOPPED else 0
        self._times_stopped[member] = times
        return status in ENDED or times * LOOK_EVERY_S > STOPPED_LIMIT_S

    def _must_end(self, term: Term) -> bool:
        """True if another member is lost, or has called the generation off."""
        # Even if it is over: the first `call_off` may have missed later sockets, or a step that was not set yet.
        if term.is_over.is_set() or self._membership.settled("over", term.generation.number):
            return True
        is_broken = not self.lost.isdisjoint(term.generation.members)
        return is_broken and not self._membership.settled("finished")
