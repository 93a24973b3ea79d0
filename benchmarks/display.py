"""What the benchmarks show on a terminal: progress, and the cells of their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

StartBar = Callable[[str, int], Callable[[], None]]


@contextmanager
def progress_of(rank: int) -> Iterator[StartBar]:
    """Yields `start(title, total)`, which returns what is to be called at each of the `total` rounds.

    Only rank 0 shows anything. It draws when it is told to: a thread that draws would draw inside a timed turn.
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


def console_of() -> Console:
    """Wide enough for the tables: a line that a terminal wraps is better than a column that is left out."""
    return Console(width=max(Console().width, 128))


def table_of(title: str, first: str, *headings: str, caption: str | None = None) -> Table:
    """One column of names, then columns of figures."""
    table = Table(title=title, caption=caption)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def interval(estimate: Mapping[str, Any], digits: int = 3) -> str:
    return f"{estimate['low']:.{digits}f}–{estimate['high']:.{digits}f}"


def rounds_in_words(config: Mapping[str, Any]) -> str:
    """Of a report's `config`; see `harness.Rounds`."""
    return f"{'at least ' if config.get('seconds') else ''}{config['rounds']} rounds"
