"""The table that adds up to a step, for the terminal and the page, and the text in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from minddp.platform.wording import count, size
from minddp.tools.xray import words
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.timeline import Activity, RankStep, RecordedStep

MOST_COLUMNS = 8
NOTABLE_NS = 5_000  # shorter times are written as 0.00 ms


class Row(NamedTuple):
    """A row of the table, with a cell for each column; `activity` is None in rows that are no activity."""

    label: str
    cells: list[str]
    activity: Activity | None = None


def rows_of(columns: Sequence[tuple[RecordedStep, RankStep]]) -> Iterator[Row]:
    """Activities that take a notable time, and their sum; then the communication."""
    ranks = [rank for _, rank in columns]
    times: list[tuple[str, list[int], Activity | None]] = []
    for activity in Activity:
        times.append((activity.value, [rank.parts_ns[activity] for rank in ranks], activity))
        if activity is Activity.EXPOSED:
            times.append(("  waiting for a slower rank", [s.waits_for_last_ns(rank) for s, rank in columns], None))
    times.append(("step", [rank.length_ns for rank in ranks], None))
    for label, times_ns, kind in times:
        if max(times_ns) >= NOTABLE_NS:
            yield Row(label, list(map(words.ms, times_ns)), kind)
    yield Row("communication hidden", [words.percent(step.overlap(rank)) for step, rank in columns])
    yield Row("buckets", [f"{len(rank.plan.buckets)}, {size(rank.plan.nbytes)}" for rank in ranks])


def explain(analysis: Analysis, console: Console) -> None:
    """Print the typical step on each rank, and the advice."""
    step = analysis.typical
    console.print(words.headline(step), style="bold", highlight=False)
    _print_table([(f"rank {rank.rank}", step, rank) for rank in step.ranks], console)
    advice = [f"{k}. {sentence}" for k, sentence in enumerate(words.advice_sentences(analysis), 1)]
    which = f"This is step {step.number}, the median of {count(len(analysis.steps), 'step')}."
    facts = f"{which} {words.facts(analysis.recording)}"
    for sentence in [words.noise_sentence(analysis), *advice, *words.model_sentences(analysis), facts]:
        console.print(sentence, markup=False, highlight=False)


def compare(analyses: Sequence[Analysis], console: Console) -> None:
    """Print the typical step of each recording on its slowest rank."""
    steps = [(one.recording.title, one.typical) for one in analyses]
    _print_table([(title, step, step.slowest) for title, step in steps], console)


def _print_table(columns: Sequence[tuple[str, RecordedStep, RankStep]], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", style="dim")
    for name, _, _ in columns[:MOST_COLUMNS]:
        table.add_column(name, justify="right")
    for label, cells, activity in rows_of([(step, rank) for _, step, rank in columns[:MOST_COLUMNS]]):
        table.add_row(label, *cells, style="red" if activity is Activity.EXPOSED else "")
    console.print(table)
    if len(columns) > MOST_COLUMNS:
        console.print(f"And {len(columns) - MOST_COLUMNS} more.")
