"""The report of an audit: the verdict and the weights, in the terminal and as a page that needs no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from minddp.platform import wording
from minddp.tools.audit.verdict import Measured, Verdict, judge
from minddp.tools.audit.weights import AuditedStep, Group


class Weights(NamedTuple):
    """The shares in one gradient, or in several that are equal: a row for each rank, a cell for each micro-batch."""

    title: str
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Report:
    """`steps` of all ranks, of parameters with these `names`."""

    title: str
    names: Sequence[str]
    steps: Sequence[AuditedStep]
    notes: Sequence[str] = ()

    @property
    def verdict(self) -> Verdict:
        """The fault that most steps have; without one, what most steps say.

        Raises:
            RuntimeError: no step could be audited.
        """
        if not self.steps:
            raise RuntimeError(f"No step could be audited. {' '.join(self.notes)}".strip())
        return self.verdicts()[0]

    def verdicts(self) -> list[Verdict]:
        """One of each kind and group, faults first, then the most frequent."""
        found = [verdict for step in self.steps for _, verdict in self.judged(step)]
        times = Counter(verdict.kind for verdict in found)
        first = {verdict.kind: verdict for verdict in reversed(found)}
        return sorted(first.values(), key=lambda verdict: (not verdict.is_fault, -times[verdict.kind]))

    def judged(self, step: AuditedStep) -> Iterator[tuple[Group, Verdict]]:
        num_params = sum(len(group.params) for group in step.groups)
        for group in step.groups:
            yield group, judge(step, group, self.names, num_params)

    def weights(self) -> Iterator[Weights]:
        """Those of the first step, for each group of parameters."""
        for group, _ in self.judged(self.steps[0]):
            measured = Measured.of(self.steps[0], group)
            tables: dict[tuple[Any, ...], list[int]] = {}
            for observer, shares in zip(measured.observers, measured.best_shares(), strict=True):
                rows = tuple((rank, *cells(shares[measured.rank == rank])) for rank in range(measured.num_ranks))
                tables.setdefault(rows, []).append(observer)
            for rows, observers in tables.items():
                whose = f"{wording.ranks(observers)}'s" if len(tables) > 1 else "every rank's"
                of = "" if len(self.steps[0].groups) == 1 else f" of {wording.names([self.names[i] for i in group.params])}"
                expected = cells(measured.expected[measured.rank == 0])
                yield Weights(
                    f"In {whose} gradient{of}, residual {group.residual.max():.0e}",
                    [*((f"rank {rank}", list(row)) for rank, *row in rows), ("expected", expected)],
                )

    def explain(self, console: Console | None = None) -> None:
        """Print the verdict and the weights."""
        console = console or Console()
        for verdict in self.verdicts() if self.steps else [self.verdict]:
            console.print(verdict.text, style="bold red" if verdict.is_fault else "bold", highlight=False, markup=False)
        for weights in self.weights():
            table = Table("", *map(str, range(1, len(weights.rows[0][1]) + 1)), box=None, title=weights.title)
            for name, row in weights.rows:
                table.add_row(name, *row)
            console.print(table)
        for note in self.notes:
            console.print(note, markup=False)

    def save(self, path: str | Path) -> None:
        """Write a page."""
        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
        page = environment.from_string(files("minddp.tools.audit").joinpath("audit.html").read_text(encoding="utf-8"))
        css = Markup(files("minddp.tools.xray.page").joinpath("page.css").read_text(encoding="utf-8"))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(page.render(report=self, css=css), encoding="utf-8")


def cells(shares: Any) -> list[str]:
    return [f"{round(share, 4) + 0.0:.4g}" for share in np.asarray(shares)]
