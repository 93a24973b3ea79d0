"""Progress, and tables for a terminal and for a Markdown page."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table as RichTable

Figures = Mapping[str, Mapping[str, Any]]

RATIO = "{ratio[median]:.3f} ({ratio[low]:.3f}–{ratio[high]:.3f})"  #: a cell: a median and its 95% interval


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
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return "\n\n".join([f"### {self.title}", table, *([self.caption] if self.caption else [])])


def table_of(title: str, first: str, columns: Mapping[str, str], figures: Figures, caption: str = "") -> Table:
    """A row for each name in `figures`; each column is a format string of the figures in that row."""
    rows = [[name, *(cell.format(**of) for cell in columns.values())] for name, of in figures.items()]
    return Table(title, [first, *columns], rows, caption)


def console_of() -> Console:
    """Wide enough for the tables: a line that a terminal wraps is better than a column that is left out."""
    return Console(width=max(Console().width, 170))


def progress(title: str, total: int) -> Callable[[], None]:
    """Returns a function that counts rounds, up to `total`, on a line of rank 0's terminal."""
    done = itertools.count(1)

    def advance() -> None:
        if sys.stderr.isatty() and dist.get_rank() == 0:
            count = next(done)
            print(f"\r{title:18} {count}/{total}", end="\n" if count == total else "", file=sys.stderr, flush=True)

    return advance
