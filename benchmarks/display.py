"""What the benchmarks show: progress bars, and tables for a terminal and for a Markdown page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

StartBar = Callable[[str, int], Callable[[], None]]


@dataclass(frozen=True)
class Table:
    """One column of names, then columns of figures."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""  #: lines below the table

    def show(self, console: Console) -> None:
        drawn = RichTable(title=self.title)
        for place, heading in enumerate(self.headings):
            drawn.add_column(heading, justify="right" if place else "left", no_wrap=True)
        for row in self.rows:
            drawn.add_row(*row)
        console.print(drawn)
        if self.caption:
            console.print(self.caption, markup=False)

    def markdown(self) -> str:
        lines = [_row(self.headings), "|" + "---|" * len(self.headings), *map(_row, self.rows)]
        return "\n\n".join([f"### {self.title}", "\n".join(lines), *([self.caption] if self.caption else [])])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def interval(estimate: Mapping[str, Any], digits: int = 3) -> str:
    return f"{estimate['low']:.{digits}f}–{estimate['high']:.{digits}f}"


def ratio_cells(estimate: Mapping[str, Any]) -> list[str]:
    """The median and its interval."""
    return [f"{estimate['median']:.3f}", interval(estimate)]


def rounds_in_words(config: Mapping[str, Any]) -> str:
    """The number of rounds in a report's `config`; see `harness.Rounds`."""
    return f"{'at least ' if config.get('seconds') else ''}{config['rounds']} rounds"


def console_of() -> Console:
    """Wide enough for the tables: a line that a terminal wraps is better than a column that is left out."""
    return Console(width=max(Console().width, 140))


@contextmanager
def progress_of(rank: int) -> Iterator[StartBar]:
    """Yields `start(title, total)`, which returns what to call after each of the `total` rounds.

    Only rank 0 shows a bar. It is drawn in that call: a thread that draws would draw inside a timed turn.
    """
    with Progress(
        TextColumn("{task.description:18}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        auto_refresh=False,
        disable=rank != 0,
    ) as progress:

        def start(title: str, total: int) -> Callable[[], None]:
            bar = progress.add_task(title, total=total)

            def advance() -> None:
                progress.advance(bar)
                progress.refresh()

            return advance

        yield start
