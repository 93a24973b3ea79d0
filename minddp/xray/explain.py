"""A recording in the terminal: a table that adds up to a step, and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from minddp.platform.wording import count, size
from minddp.xray import words
from minddp.xray.analysis import Analysis
from minddp.xray.timeline import Activity, RankStep, Step

MOST_COLUMNS, MOST_WITH_SHARES = 8, 3


def explain(analyses: Sequence[Analysis], console: Console) -> None:
    """The typical step of one recording on each rank, with predictions; of several, on the slowest rank of each."""
    names = words.names([analysis.recording for analysis in analyses])
    if len(analyses) > 1:
        columns = [(name, a.typical, a.typical.slowest) for name, a in zip(names, analyses, strict=True)]
        sentences = [_in_a_line(name, analysis.typical) for name, analysis in zip(names, analyses, strict=True)]
    else:
        (analysis,) = analyses
        step = analysis.typical
        columns = [(f"rank {rank.rank}", step, rank) for rank in step.ranks]
        console.print(words.headline(step), style="bold", highlight=False)
        measured = [words.overlap_sentence(step), words.worst_sentence(step)] if step.complete else []
        sentences = [*measured, words.plans_sentence(analysis), *words.model_sentences(analysis), _facts(analysis)]
    console.print(table_of(columns[:MOST_COLUMNS]))
    if len(columns) > MOST_COLUMNS:
        sentences.insert(0, f"And {len(columns) - MOST_COLUMNS} more columns, see the page.")
    for sentence in filter(None, sentences):
        console.print(sentence, markup=False, highlight=False)


def _in_a_line(name: str, step: Step) -> str:
    messages = count(len(step.plan.buckets), "message")
    return f"{name}: {words.ms(step.length_ns)} a step, {messages}, {size(step.plan.nbytes)} in all."


def _facts(analysis: Analysis) -> str:
    steps = count(len(analysis.steps), "step")
    which = f"This is step {analysis.typical.number}, the median of {steps}." if len(analysis.steps) > 1 else ""
    return " ".join(filter(None, [which, *words.facts(analysis.recording)]))


def table_of(columns: Sequence[tuple[str, Step, RankStep]]) -> Table:
    """A column for each (name, step, rank of it); times in milliseconds, and their share of the step."""

    def cell(ns: int, share: float) -> str:
        return f"{ns / 1e6:.2f} {share:5.0%}" if len(columns) <= MOST_WITH_SHARES else f"{ns / 1e6:.1f}"

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("milliseconds", style="dim")
    for name, _, _ in columns:
        table.add_column(name, justify="right")
    for activity in Activity:
        times = [rank.parts_ns[activity] for _, _, rank in columns]
        shares = [ns / rank.length_ns for ns, (_, _, rank) in zip(times, columns, strict=True)]
        style = "red" if activity is Activity.EXPOSED and max(shares) > 0.02 else ""
        if any(times) or activity is Activity.EXPOSED:
            table.add_row(activity.value, *map(cell, times, shares), style=style)
    table.add_row("a step", *(cell(rank.length_ns, 1.0) for _, _, rank in columns), style="bold")
    table.add_row("communication hidden", *(f"{step.overlap(rank):.0%}" for _, step, rank in columns))
    return table
