"""Brings the notes of all ranks to rank 0, which compares them.

[Note: notes travel through the store]
A collective would compare notes at once, but it would change the numbers of the script's own collectives, and it
could hang. So about once a second a thread of each rank posts its notes in the store, if rank 0 has taken the
previous ones. Rank 0's thread takes them and compares. The training thread only takes notes.

A short script ends within the first second. So when the wrapper or the process ends, each rank posts its last
notes, and rank 0 waits for them up to `LAST_S` seconds, if it has notes to compare itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from minddp.platform.repeating_thread import RepeatingThread
from minddp.platform.store import Messages
from minddp.tools.watchdog.check import Check, Finding, Notes
from minddp.transport.protocols import Transport

_log = logging.getLogger("minddp.tools.watchdog")
EVERY_S = 1.0
LAST_S = 0.3
MOST_KEPT = 1024  # incomplete numbers of a check


class NotesComparison:
    """See [Note: notes travel through the store]. Rank 0 logs the findings, and has them in `found`."""

    def __init__(self, transport: Transport, checks: Mapping[str, Check]):
        self.found: list[Finding] = []
        assert transport.store is not None
        self._rank, self._world_size, self._store = transport.rank, transport.world_size, transport.store
        self._checks = checks
        self._received: dict[str, dict[int, dict[int, Any]]] = {}  # by check, number and rank
        self._messages: Messages  # once open
        self._thread: RepeatingThread | None = None

    def start(self, name: str) -> None:
        """Begin, once. Guards of equal `name` start in the same order on all ranks."""
        if self._thread is None:
            self.open(name)
            self._thread = RepeatingThread(self.turn, EVERY_S, "minddp/guard")

    def open(self, name: str) -> None:
        self._messages = Messages.open(self._store, f"minddp/guard/{name}", self._rank, self._world_size)

    def abandon(self) -> None:
        """The guard is gone. The thread ends by itself and keeps no parameter alive until then."""
        if self._thread is not None:
            self._thread.closing.set()
        for check in self._checks.values():
            check.release()

    def close(self) -> None:
        """Compare the last notes, within about `LAST_S` seconds."""
        if self._thread is not None:
            self._thread.close(2 * LAST_S)

    def turn(self, is_last: bool = False) -> None:
        key = "last" if is_last else "notes"
        if self._messages.read(self._rank, key) is None:
            notes = {name: notes for name, check in self._checks.items() if (notes := check.take_notes(is_last))}
            if notes or (is_last and self._rank != 0):  # so that rank 0 does not wait for more
                self._messages.post(notes, key)
        if self._rank == 0:
            self._compare_all(is_last)
        if is_last:
            self._messages.leave("notes", "last")

    def _compare_all(self, is_last: bool) -> None:
        """On rank 0."""
        last = {}
        if is_last:
            has_notes = self._messages.read(0, "last") is not None
            last = self._messages.gather("last", limit_s=LAST_S if has_notes else 0.0)
        for rank in range(self._world_size):
            self._compare(rank, self._messages.take(rank, "notes") or {})
            self._compare(rank, last.get(rank, {}))

    def _compare(self, rank: int, notes: Mapping[str, Notes]) -> None:
        """Compare each number for which the notes of all ranks are present."""
        for name, number, note in ((check, *numbered) for check in notes for numbered in notes[check]):
            received = self._received.setdefault(name, {})
            of_rank = received.setdefault(number, {})
            of_rank[rank] = note
            if len(of_rank) == self._world_size:
                del received[number]
                for finding in self._checks[name].compare(number, [note for _, note in sorted(of_rank.items())]):
                    self._report(finding)
            elif len(received) > MOST_KEPT:
                del received[min(received)]

    def _report(self, finding: Finding) -> None:
        """Once for each subject."""
        if (finding.check, finding.subject) not in [(known.check, known.subject) for known in self.found]:
            self.found.append(finding)
            _log.warning("%s", finding.text, extra={"finding": finding})
