"""A thread of each member that shows that it lives, and that notices when the generation has lost another one.

It calls the generation off, and the main thread comes back with an error. See [Note: hanging up].
"""

from __future__ import annotations

import threading
import time

from minddp.platform.repeating_thread import AT_EXIT_S
from minddp.tools.elastic.connections import Connections
from minddp.tools.elastic.membership import Generation, Membership
from minddp.tools.watchdog import WatchedTransport
from minddp.transport.protocols import Transport

BEAT_EVERY_S = 0.25
LOOK_EVERY_S = 0.1


class Term:
    """The time in which this process is a member of a generation. `step` is the one that is computed.

    The sockets that it opens from the construction on, until `connections.complete`, are those of the generation.
    """

    def __init__(self, generation: Generation):
        self.generation = generation
        self.connections = Connections()
        self.is_over = threading.Event()
        self.step = -1
        self.admits = False  # others, now that this step has counted
        self.transport: Transport | None = None  # once the group is made

    def call_off(self, membership: Membership) -> None:
        """No member counts this step, or waits any longer. May be called again, and by any thread."""
        number = self.generation.number
        self.is_over.set()  # before `step` is read: see Session.vote
        membership.store.set(f"over/{number}", "")
        membership.store.compare_set(f"verdict/{number}/{self.step}", "", "again")
        self.connections.hang_up()
        if isinstance(self.transport, WatchedTransport):
            self.transport.end_waits(f"Generation {number} was called off.")


class Heartbeat:
    """Beats until `stop`. A member whose heart has not beaten for `silent_limit_s` counts as lost."""

    def __init__(self, membership: Membership, silent_limit_s: float):
        self.term: Term | None = None
        self.watched: tuple[int, ...] = ()  # members
        self.silent: frozenset[int] = frozenset()  # members that count as lost
        self.error: RuntimeError | None = None  # the store has ended
        self._membership = Membership(membership.store.clone(), membership.member)  # type: ignore[attr-defined]
        self._silent_limit_s = silent_limit_s
        self._last_change: dict[int, tuple[bytes, float]] = {}  # of each member's beat, and when it was seen
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="minddp/heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The interpreter may end next, and aborts if a thread is inside the store then."""
        self._stopping.set()
        self._thread.join(AT_EXIT_S)

    def _run(self) -> None:
        beats, next_beat = 0, 0.0
        try:
            while not self._stopping.is_set():
                if time.monotonic() >= next_beat:
                    beats, next_beat = beats + 1, time.monotonic() + BEAT_EVERY_S
                    self._membership.store.set(f"beat/{self._membership.member}", str(beats))
                self._listen()
                self._look_after(self.term)
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
        self.silent = frozenset(member for member in watched if self._last_change[member][1] < limit)

    def _look_after(self, term: Term | None) -> None:
        """Call the generation off if it has lost a member, or another one has called it off."""
        if term is None:
            return
        number, ours = term.generation.number, self._membership.member
        others = [member for member in term.generation.members if member != ours]
        if (
            term.is_over.is_set()  # and this thread may have been too early to hang up, or to know the step
            or self._membership.read(f"over/{number}") is not None
            or (
                self._membership.read("finished") is None
                and any(member in self.silent or self._membership.process_is_gone(member) for member in others)
            )
        ):
            term.call_off(self._membership)
