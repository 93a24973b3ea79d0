"""The report of an audit: verdicts and weights, in the terminal and as a page that needs no network."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from minddp.tools.audit.verdict import CLOSE, Judge, Verdict
from minddp.tools.audit.weights import AuditedStep


class Report(NamedTuple):
    """`steps` of all ranks, of parameters with these `names`."""

    names: Sequence[str]
    steps: Sequence[AuditedStep]
    notes: Sequence[str] = ()

    def verdicts(self) -> list[Verdict]:
        """One of each kind: faults first, then what cannot be told."""
        if not self.steps:
            return [Verdict("no step", False, "No step could be audited.")]
        found = [Judge(step, group, self.names).verdict() for step in self.steps for group in step.groups]
        first = {verdict.kind: verdict for verdict in reversed(found)}
        return sorted(first.values(), key=lambda it: (not it.is_fault, it.kind == "right"))

    def tables(self) -> Iterator[tuple[str, list[list[str]]]]:
        """The shares in the first step, for each group of parameters: a title, and rows of a rank each."""
        for group in self.steps[0].groups if self.steps else ():
            judge = Judge(self.steps[0], group, self.names)
            whose = "every rank" if np.allclose(judge.shares, judge.shares[0], rtol=CLOSE) else "rank 0"
            rows = [["micro-batch", *(str(number + 1) for number in range(judge.per_rank))]]
            for rank in np.unique(judge.rank):
                pairs = zip(judge.shares[0, judge.rank == rank], judge.expected[judge.rank == rank], strict=True)
                rows.append([f"rank {rank}", *(f"{round(it, 4) + 0.0:.4g} / {due:.4g}" for it, due in pairs)])
            yield f"Shares in {whose}'s gradient{judge.of}, and what they should be", rows

    def explain(self, console: Console | None = None) -> None:
        """Print verdicts and shares."""
        console = console or Console(highlight=False)
        for verdict in self.verdicts():
            console.print(verdict.text, style="bold red" if verdict.is_fault else "bold", markup=False)
        for title, (head, *rows) in self.tables():
            table = Table(*head, box=None)
            for row in rows:
                table.add_row(*row)
            console.print(f"\n{title}", table, sep="\n")
        console.print(*self.notes, markup=False)

    def save(self, path: str | Path) -> None:
        """Write the same as a page."""
        console = Console(file=io.StringIO(), record=True, width=120, highlight=False)
        self.explain(console)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        console.save_html(str(path))
