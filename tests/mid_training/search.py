"""Plays scripts on a pool of ranks; what fails is made as small as it will go, and printed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tests.mid_training.generate import script_from
from tests.mid_training.script import Line, Script
from tests.mid_training.side import SUBJECT
from tests.mid_training.verdict import play_script
from tests.parity.scenario import Options
from tests.ranks import RankFailure, RankPool

LIMIT_S = 30.0
SHRINK_S = 60.0


@dataclass
class Search:
    """Plays scripts, counts what became of them, and keeps the failures, shrunk."""

    pool_of: Callable[[int], RankPool]
    subject: str = SUBJECT
    limit_s: float = LIMIT_S
    shrink_s: float = SHRINK_S
    played: int = 0
    lines: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    failures: dict[Script, str] = field(default_factory=dict)
    wrong_torch: dict[Script, str] = field(default_factory=dict)

    def play(self, script: Script) -> str | None:
        """What broke a rule, if anything did: a mismatch, an error, a rank that died or hung."""
        pool = self.pool_of(script.world_size)
        try:
            reports = pool.run(play_script, script, self.subject, self.limit_s, timeout_s=self.limit_s + 5)
        except RankFailure as failure:
            return str(failure)
        failure = next((report.failure for report in reports if report.failure), None)
        for note in reports[0].notes:
            self.notes[note.split(":")[0]] += 1
            if "torch is silently wrong" in note:
                self.wrong_torch[script] = note
        return failure

    def from_seed(self, seed: int) -> None:
        script = script_from(seed)
        self.played += 1
        self.lines.update(line.name for line in script.lines)
        if (failure := self.play(script)) is not None:
            self.notes["failed"] += 1
            small, what = self.shrunk(script, failure)
            self.failures[small] = f"seed {seed}: {what}"
            self.pool_of(script.world_size).kill()  # its ranks may be out of step

    def shrunk(self, script: Script, failure: str) -> tuple[Script, str]:
        """A script with fewer lines, layers and options that fails as well, and how it does."""
        until = time.monotonic() + self.shrink_s
        candidates = smaller(script)
        while (candidate := next(candidates, None)) is not None and time.monotonic() < until:
            if (found := self.play(candidate)) is not None:
                script, failure = candidate, found
                candidates = smaller(script)
        return script, failure

    def __str__(self) -> str:
        counted = ", ".join(f"{what} {count}" for what, count in self.notes.most_common())
        parts = [f"{self.played} scripts; {counted or 'nothing to note'}"]
        parts += [f"{script!r}\n{what}" for script, what in self.failures.items()]
        return "\n\n".join(parts)


def smaller(script: Script) -> Iterator[Script]:
    """Scripts with one thing less."""
    for index in reversed(range(len(script.lines))):
        yield script.without_line(index)
    if script.calm_steps:
        yield replace(script, calm_steps=0)
        yield replace(script, calm_steps=script.calm_steps - 1)
    if script.goes_on:
        yield replace(script, goes_on=False)
    for index in range(len(script.layers)) if len(script.layers) > 1 else ():
        yield replace(script, layers=script.layers[:index] + script.layers[index + 1 :])
    for name in Options.offered():
        if getattr(script.options, name) != getattr(Options, name):
            yield replace(script, options=replace(script.options, **{name: getattr(Options, name)}))
    if script.world_size > 2:
        transport = "process_group" if script.transport == "hierarchical" else script.transport
        yield replace(script, world_size=2, transport=transport)
    if script.transport != "process_group":
        yield replace(script, transport="process_group")
    if not script.accelerated:
        yield replace(script, accelerated=True)
    for index, line in enumerate(script.lines):
        if line.args and isinstance(line.args[0], int) and line.args[0] and line.name != "windows":
            lines = (*script.lines[:index], Line(line.name, (0, *line.args[1:])), *script.lines[index + 1 :])
            yield replace(script, lines=lines)
