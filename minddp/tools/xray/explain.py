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


def rows_of(step: RecordedStep, ranks: Sequence[RankStep]) -> Iterator[Row]:
    """Activities that take a notable time, and their sum; then the communication."""
    times: list[tuple[str, list[int], Activity | None]] = []
    for activity in Activity:
        times.append((activity.value, [rank.parts_ns[activity] for rank in ranks], activity))
        if activity is Activity.EXPOSED:
            times.append(("  waiting for a slower rank", [step.waits_for_last_ns(rank) for rank in ranks], None))
    times.append(("step", [rank.length_ns for rank in ranks], None))
    for label, times_ns, kind in times:
        if max(times_ns) >= NOTABLE_NS:
            yield Row(label, list(map(words.ms, times_ns)), kind)
    yield Row("communication hidden", [words.percent(step.overlap(rank)) for rank in ranks])
    yield Row("buckets", [f"{len(rank.plan.buckets)}, {size(rank.plan.nbytes)}" for rank in ranks])


def explain(analysis: Analysis, console: Console) -> None:
    """Print the typical step on each rank, and the advice."""
    step = analysis.typical
    console.print(words.headline(step), style="bold", highlight=False)
    _print_table(step, console)
    advice = [f"{k}. {sentence}" for k, sentence in enumerate(words.advice_sentences(analysis), 1)]
    which = f"This is step {step.number}, the median of {count(len(analysis.steps), 'step')}."
    facts = f"{which} {words.facts(analysis.recording)}"
    for sentence in [words.noise_sentence(analysis), *advice, *words.model_sentences(analysis), facts]:
        console.print(sentence, markup=False, highlight=False)


def _print_table(step: RecordedStep, console: Console) -> None:
    shown, more = step.ranks[:MOST_COLUMNS], len(step.ranks) - MOST_COLUMNS
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", style="dim")
    for rank in shown:
        table.add_column(f"rank {rank.rank}", justify="right")
    for label, cells, activity in rows_of(step, shown):
        table.add_row(label, *cells, style="red" if activity is Activity.EXPOSED else "")
    console.print(table)
    if more > 0:
        console.print(f"And {more} more.")
