"""The heartbeat thread of a member. It tells the others that this process is alive, and notices lost members.

When a member is lost, the thread calls the generation off, so that all waits of the main thread end with an error.
See [Note: hanging up].
"""

from __future__ import annotations

import threading
import time

from minddp.platform.repeating_thread import AT_EXIT_S, RepeatingThread
from minddp.platform.store import own_connection
from minddp.tools.elastic.connections import Connections
from minddp.tools.elastic.membership import Generation, Membership
from minddp.tools.watchdog import WatchedTransport
from minddp.transport.protocols import Transport

LOOK_EVERY_S = 0.1


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
        self.is_over.set()  # before `step` is read: see Session.vote
        membership.store.set(f"over/{number}", "")
        membership.store.compare_set(f"verdict/{number}/{self.step}", "", "again")
        self.connections.hang_up()
        if isinstance(self.transport, WatchedTransport):
            self.transport.end_waits(f"Generation {number} was called off.")


class Heartbeat:
    """Runs until `stop`. A member is lost if its process has ended, or its beat does not change for a while."""

    def __init__(self, membership: Membership, silent_limit_s: float):
        # Set by the main thread.
        self.term: Term | None = None
        self.watched: frozenset[int] = frozenset()  # members
        # Set by this thread.
        self.lost: frozenset[int] = frozenset()  # of those watched
        self.error: RuntimeError | None = None
        self._beats: dict[int, tuple[bytes, int]] = {}  # by member: its latest beat, and how often it was the same

        self._membership = Membership(own_connection(membership.store), membership.member)
        self._silent_limit_s = silent_limit_s
        self._thread = RepeatingThread(self._turn, LOOK_EVERY_S, "minddp/heartbeat")

    def stop(self) -> None:
        self._thread.close(AT_EXIT_S)

    def check_store(self) -> None:
        """Raise RuntimeError if the store has ended."""
        if self.error is not None:
            raise RuntimeError("The store has ended, and with it the job.") from self.error

    def _turn(self, _is_last: bool) -> None:
        term = self.term
        try:
            self._membership.store.set(f"beat/{self._membership.member}", str(time.monotonic()))
            self.lost = self._lost_members(sorted(self.watched))
            if term is not None and self._must_end(term):
                term.call_off(self._membership)
        except RuntimeError as error:
            self.error = error
            if term is not None:
                term.is_over.set()
                term.connections.hang_up()
            raise

    def _lost_members(self, watched: list[int]) -> frozenset[int]:
        store = self._membership.store
        beats = store.multi_get([f"beat/{member}" for member in watched]) if watched else []  # type: ignore[attr-defined]
        for member, beat in zip(watched, beats, strict=True):
            before, times = self._beats.get(member, (b"", 0))
            self._beats[member] = beat, times + 1 if beat == before else 0
        # Not by a clock: after a stop of this process, or of the whole machine, all beats are old.
        silent = {member for member in watched if self._beats[member][1] * LOOK_EVERY_S > self._silent_limit_s}
        return frozenset(silent.union(filter(self._membership.processes.has_ended, watched)))

    def _must_end(self, term: Term) -> bool:
        """True if another member is lost, or has called the generation off."""
        # Even if it is over: the first `call_off` may have missed later sockets, or a step that was not set yet.
        if term.is_over.is_set() or self._membership.read(f"over/{term.generation.number}") is not None:
            return True
        is_broken = not self.lost.isdisjoint(term.generation.members)
        return is_broken and self._membership.read("finished") is None
