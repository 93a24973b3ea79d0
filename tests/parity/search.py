"""Plays scripts on a pool of ranks; a script that fails is printed, to be shortened by hand and played again."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.parity.generate import script_from
from tests.parity.script import Script
from tests.parity.side import SUBJECT
from tests.parity.verdict import play_script
from tests.ranks import RankFailure, RankPool

LIMIT_S = 60.0
_LONGEST_TRACE = 20


def new_pool(world_size: int) -> RankPool:
    """Its group waits longer than any script may take: a hang must not look like an error that is raised."""
    return RankPool(world_size, group_timeout_s=120.0, grace_s=2.0)


@dataclass
class Search:
    """Plays scripts, counts their outcomes, and keeps the failures.

    `subject` is the wrapper under test. `last_notes` are those of the script that was played last.
    """

    pool_of: Callable[[int], RankPool]
    subject: str = SUBJECT
    limit_s: float = LIMIT_S
    played: int = 0
    last_notes: list[str] = field(default_factory=list)
    lines: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    failures: dict[Script, str] = field(default_factory=dict)

    def play(self, script: Script) -> str | None:
        """What broke a rule, if anything did: a mismatch, an error, a rank that died or hung."""
        self.last_notes = []
        with tempfile.TemporaryDirectory(prefix="minddp-test-") as traces:
            try:
                reports = self.pool_of(script.world_size).run(
                    play_script, script, self.subject, self.limit_s, traces, timeout_s=self.limit_s + 1
                )
            except RankFailure as failure:
                return "\n".join([str(failure), *_where_ranks_were(traces)])
        # What one rank has met may be news to the others only in the verdict.
        failures = [f"rank {rank}: {report.failure}" for rank, report in enumerate(reports) if report.failure]
        if all(report.states == reports[0].states for report in reports):
            failures += [f"a false alarm: {text}" for text in reports[0].findings]
        failure = "\n".join(failures) or None
        self.last_notes = reports[0].notes
        return failure

    def from_seed(self, seed: int) -> None:
        script = script_from(seed)
        self.played += 1
        self.lines.update(line.name for line in script.lines)
        if (failure := self.play(script)) is not None:
            self.failures[script] = f"seed {seed}: {failure}"
            self.pool_of(script.world_size).kill()  # its ranks may be out of step
            return
        for note in self.last_notes:
            self.notes[note.split(":")[0]] += 1

    def __str__(self) -> str:
        counted = ", ".join(f"{what} {count}" for what, count in self.notes.most_common())
        parts = [f"{self.played} scripts; {counted or 'nothing to note'}"]
        parts += [f"{script!r}\n{what}" for script, what in self.failures.items()]
        return "\n\n".join(parts)


def _where_ranks_were(traces: str) -> Iterator[str]:
    """The innermost calls of each rank that has run out of time."""
    for path in sorted(Path(traces).iterdir()):
        if lines := path.read_text().splitlines():
            main_thread = max(number for number, line in enumerate(lines) if line.startswith("Thread"))
            yield "\n".join([f"--- rank {path.name} was in", *lines[main_thread:][:_LONGEST_TRACE]])
