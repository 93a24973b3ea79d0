"""The heartbeat thread of a member. It tells the others that this process is alive, and notices lost members.

When a member is lost, the thread calls the generation off, so that all waits of the main thread end with an error.
See [Note: hanging up].
"""

from __future__ import annotations

import threading
import time

from minddp.platform.repeating_thread import AT_EXIT_S
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
    """Runs the thread until `stop`. A member whose beat has not changed for `silent_limit_s` counts as lost."""

    def __init__(self, membership: Membership, silent_limit_s: float):
        # Set by the main thread.
        self.term: Term | None = None
        self.watched: tuple[int, ...] = ()  # members
        # Set by this thread.
        self.error: RuntimeError | None = None
        self._silent: frozenset[int] = frozenset()
        self._last_change: dict[int, tuple[bytes, float]] = {}  # by member: its latest beat, and when it changed

        self._membership = Membership(membership.store.clone(), membership.member)  # type: ignore[attr-defined]
        self._silent_limit_s = silent_limit_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="minddp/heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the thread: an interpreter that ends while a thread is inside the store aborts."""
        self._stopping.set()
        self._thread.join(AT_EXIT_S)

    def check_store(self) -> None:
        """Raise RuntimeError if the store has ended."""
        if self.error is not None:
            raise RuntimeError("The store has ended, and with it the job.") from self.error

    def is_lost(self, member: int, membership: Membership) -> bool:
        """True if the member is silent, or its process has ended. `membership` is that of the calling thread."""
        return member in self._silent or membership.processes.has_ended(member)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._membership.store.set(f"beat/{self._membership.member}", str(time.monotonic()))
                self._listen()
                if (term := self.term) is not None and self._must_end(term):
                    term.call_off(self._membership)
                self._stopping.wait(LOOK_EVERY_S)
        except RuntimeError as error:
            self.error = error
            if (term := self.term) is not None:
                term.is_over.set()
                term.connections.hang_up()

    def _listen(self) -> None:
        watched, now = self.watched, time.monotonic()
        for member, beat in zip(watched, self._membership.beats(watched) if watched else (), strict=True):
            if self._last_change.get(member, (b"", 0.0))[0] != beat:
                self._last_change[member] = beat, now
        limit = now - self._silent_limit_s
        self._silent = frozenset(member for member in watched if self._last_change[member][1] < limit)

    def _must_end(self, term: Term) -> bool:
        """True if another member is lost, or has called the generation off."""
        # Even if it is over: the first `call_off` may have missed later sockets, or a step that was not set yet.
        if term.is_over.is_set() or self._membership.read(f"over/{term.generation.number}") is not None:
            return True
        if self._membership.read("finished") is not None:
            return False
        others = set(term.generation.members) - {self._membership.member}
        return any(self.is_lost(member, self._membership) for member in others)
