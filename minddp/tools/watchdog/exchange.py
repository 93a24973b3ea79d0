"""A thread brings the notes of all ranks to rank 0, and what rank 0 finds to all.

[Note: notes travel through the store]
A collective would compare notes at once. But then every collective of a script has another number, and one more can
hang. So about once a second a thread of each rank writes notes to the store, if its last ones have been read; rank
0's thread reads and compares them, and writes what it finds for all. The thread that trains only notes.

A script of twenty steps is over before the first second. So when the wrapper or the process ends, a rank that has
noted something writes it, and rank 0 waits for the others' last notes, but at most `LAST_S` seconds, and only if it
has something to compare itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch.distributed as dist

from minddp.tools.watchdog.board import Board
from minddp.tools.watchdog.check import Check, Finding, Notes, ReplicasDrift

_log = logging.getLogger("minddp.tools.watchdog")
EVERY_S = 1.0
LAST_S = 0.3
POLL_S = 0.01
RAISES_AFTER_TURNS = 3  # by then all ranks have read it
MOST_KEPT = 1024  # numbers of a check, of which not all ranks have sent notes


class Exchange:
    """See [Note: notes travel through the store]. `step` is the latest step of this rank.

    Findings are kept in `found` on each rank, logged on rank 0; with `raises`, the first fatal one is `pending`.
    """

    def __init__(self, rank: int, world_size: int, checks: Mapping[str, Check], store: dist.Store, *, raises: bool):
        self.step = self._previous_step = 0
        self.found: list[Finding] = []
        self.pending: Finding | None = None
        self.board = Board(store, rank)
        self._rank = rank
        self._world_size = world_size
        self._checks = checks
        self._raises = raises
        self._received: dict[str, dict[int, dict[int, Any]]] = {}  # by check, number and rank
        self._is_open = False

    def open(self, name: str) -> None:
        """Begin, once. Guards of equal `name` open in the same order on all ranks."""
        if not self._is_open:
            self._is_open = True
            self.board.open(f"minddp/guard/{name}")
            self.board.start(self.turn, EVERY_S, "minddp/guard")

    def abandon(self) -> None:
        """The guard is gone. The thread ends by itself, and until then keeps no parameter alive."""
        self.board.closing.set()
        for check in self._checks.values():
            check.let_go()

    def close(self) -> None:
        """Make the last exchange, which takes `LAST_S` seconds at most."""
        self.board.close(2 * LAST_S)

    def raise_if_due(self, step: int) -> None:
        """Called by the thread that trains.

        Raises:
            ReplicasDrift: something fatal has been found, and it was asked for.
        """
        if self.pending is not None and step >= self.pending.raises_in_step:
            pending, self.pending = self.pending, None
            raise ReplicasDrift(pending.text)

    def turn(self, is_last: bool = False) -> None:
        """Of this rank's thread."""
        self._exchange(is_last)
        if is_last:
            of_ranks = product(("notes", "last"), range(self._world_size))
            self.board.leave(self._world_size, [*of_ranks, *(("finding", n) for n in range(len(self.found)))])

    def _exchange(self, is_last: bool) -> None:
        if self._rank != 0:
            kind = "last" if is_last else "notes"
            while (finding := self.board.read("finding", len(self.found))) is not None:
                self._add(finding)
            if self.board.read(kind, self._rank) is None and (notes := self._notes(is_last)):
                self.board.write(notes, kind, self._rank)
            return
        steps_per_turn, self._previous_step = self.step - self._previous_step, self.step
        raises_in_step = self.step + RAISES_AFTER_TURNS * steps_per_turn + 2
        self._examine(0, notes := self._notes(is_last), raises_in_step)
        self._examine_others("notes", raises_in_step)
        deadline = time.monotonic() + LAST_S
        absent = set(range(1, self._world_size)) if is_last and notes else set()
        while absent and time.monotonic() < deadline:
            absent -= self._examine_others("last", raises_in_step)
            time.sleep(POLL_S if absent else 0)

    def _notes(self, is_last: bool) -> dict[str, Notes]:
        return {name: notes for name, check in self._checks.items() if (notes := check.take_notes(is_last))}

    def _add(self, finding: Finding) -> bool:
        """False if the same has been found before."""
        if any((known.check, known.subject) == (finding.check, finding.subject) for known in self.found):
            return False
        self.found.append(finding)
        if self._raises and finding.is_fatal:
            self.pending = self.pending or finding
        if self._rank == 0:
            _log.warning("%s", finding.text)
        return True

    def _examine_others(self, kind: str, raises_in_step: int) -> set[int]:
        """Read the others' notes; returns the ranks that had some."""
        present = set()
        for rank in range(1, self._world_size):
            if (notes := self.board.read(kind, rank)) is not None:
                self.board.delete(kind, rank)
                self._examine(rank, notes, raises_in_step)
                present.add(rank)
        return present

    def _examine(self, rank: int, notes: Mapping[str, Notes], raises_in_step: int) -> None:
        """Compare what all ranks have noted. Ranks send rising numbers: what is lower and incomplete remains so."""
        for name, number, note in ((check, *numbered) for check in notes for numbered in notes[check]):
            received = self._received.setdefault(name, {})
            of_rank = received.setdefault(number, {})
            of_rank[rank] = note
            if len(of_rank) == self._world_size:
                while (oldest := next(iter(received))) != number:
                    del received[oldest]
                del received[number]
                in_order = [of_rank[rank] for rank in range(self._world_size)]
                for found in self._checks[name].compare(number, in_order):
                    finding = replace(found, raises_in_step=raises_in_step)
                    if self._add(finding):
                        self.board.write(finding, "finding", len(self.found) - 1)
            elif len(received) > MOST_KEPT:
                del received[min(received)]
