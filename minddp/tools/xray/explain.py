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
    """Activities that take a notable time, their parts by module, their sum; then communication and memory."""
    ranks = [rank for _, rank in columns]
    modules = dict.fromkeys(span.module for rank in ranks for span in rank.spans if span.module)
    times: list[tuple[str, list[int], Activity | None]] = []
    for activity in Activity:
        times.append((activity.value, [rank.parts_ns[activity] for rank in ranks], activity))
        times += [(f"  {name}", [rank.module_ns(activity, name) for rank in ranks], None) for name in modules]
        if activity is Activity.EXPOSED:
            times.append(("  waiting for a slower rank", [s.waits_for_last_ns(rank) for s, rank in columns], None))
    times.append(("step", [rank.length_ns for rank in ranks], None))
    for label, times_ns, kind in times:
        if max(times_ns) >= NOTABLE_NS:
            yield Row(label, list(map(words.ms, times_ns)), kind)
    yield Row("communication hidden", [words.percent(step.overlap(rank)) for step, rank in columns])
    yield Row("buckets", [f"{len(rank.plan.buckets)}, {size(rank.plan.nbytes)}" for rank in ranks])
    if all(rank.peak_bytes for rank in ranks):
        shares = [words.percent(rank.plan.nbytes / rank.peak_bytes) for rank in ranks]
        peaks = [f"{size(rank.peak_bytes)} ({share})" for rank, share in zip(ranks, shares, strict=True)]
        yield Row("peak memory (share of buckets)", peaks)


def explain(analyses: Sequence[Analysis], console: Console) -> None:
    """The typical step of one recording on each rank, with predictions; of several, on the slowest rank of each."""
    names = words.names([analysis.recording for analysis in analyses])
    columns = [(name, one.typical, one.typical.slowest) for name, one in zip(names, analyses, strict=True)]
    sentences: list[str] = []
    if len(analyses) == 1:
        (analysis,) = analyses
        step = analysis.typical
        columns = [(f"rank {rank.rank}", step, rank) for rank in step.ranks]
        console.print(words.headline(step), style="bold", highlight=False)
        if step.complete:
            advice = [f"{k}. {sentence}" for k, sentence in enumerate(words.advice_sentences(analysis), 1)]
            sentences += [words.noise_sentences(analysis), *advice, *words.model_sentences(analysis)]
        which = f"This is step {step.number}, the median of {count(len(analysis.steps), 'step')}."
        sentences.append(" ".join([which, *words.facts(analysis.recording)]))
    if len(columns) > MOST_COLUMNS:
        sentences.insert(0, f"And {len(columns) - MOST_COLUMNS} more columns, see the page.")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", style="dim")
    for name, _, _ in columns[:MOST_COLUMNS]:
        table.add_column(name, justify="right")
    for label, cells, activity in rows_of([(step, rank) for _, step, rank in columns[:MOST_COLUMNS]]):
        table.add_row(label, *cells, style="red" if activity is Activity.EXPOSED else "")
    console.print(table)
    for sentence in sentences:
        console.print(sentence, markup=False, highlight=False)
