"""A recording in the terminal: a table that adds up to a step, and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from minddp.platform.wording import count
from minddp.tools.xray import words
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.parts import last_rows_of, rows_of
from minddp.tools.xray.timeline import Activity, RankStep, Step

MOST_COLUMNS, MOST_WITH_SHARES = 8, 3


def explain(analyses: Sequence[Analysis], console: Console) -> None:
    """The typical step of one recording on each rank, with predictions; of several, on the slowest rank of each."""
    names = words.names([analysis.recording for analysis in analyses])
    if len(analyses) > 1:
        columns = [(name, a.typical, a.typical.slowest) for name, a in zip(names, analyses, strict=True)]
        sentences = []
    else:
        (analysis,) = analyses
        step = analysis.typical
        columns = [(f"rank {rank.rank}", step, rank) for rank in step.ranks]
        console.print(words.headline(step), style="bold", highlight=False)
        if step.complete:
            sentences = [words.noise_sentence(analysis), words.modules_sentence(step), words.verdict(analysis)]
            advice = words.advice_sentences(analysis)
            sentences += [f"{number}. {sentence}" for number, sentence in enumerate(advice, 1)]
            sentences += [words.model_warning(analysis), *words.model_sentences(analysis), _facts(analysis)]
        else:
            sentences = [_facts(analysis)]
    console.print(table_of(columns[:MOST_COLUMNS]))
    if len(columns) > MOST_COLUMNS:
        sentences.insert(0, f"And {len(columns) - MOST_COLUMNS} more columns, see the page.")
    for sentence in filter(None, sentences):
        console.print(sentence, markup=False, highlight=False)


def _facts(analysis: Analysis) -> str:
    steps = count(len(analysis.steps), "step")
    which = f"This is step {analysis.typical.number}, the median of {steps}." if len(analysis.steps) > 1 else ""
    return " ".join(filter(None, [which, *words.facts(analysis.recording)]))


def table_of(columns: Sequence[tuple[str, Step, RankStep]]) -> Table:
    """A column for each (name, step, rank of it); times in milliseconds, and their share of the step."""
    has_shares = len(columns) <= MOST_WITH_SHARES
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("milliseconds", style="dim")
    for name, _, _ in columns:
        table.add_column(name, justify="right")
    for row in rows_of([(step, rank) for _, step, rank in columns]):
        shares = [ns / rank.length_ns for ns, (_, _, rank) in zip(row.times_ns, columns, strict=True)]
        style = "red" if row.activity is Activity.EXPOSED and max(shares) > 0.02 else ""
        cells = [
            f"{ns / 1e6:.2f} {share:5.0%}" if has_shares else f"{ns / 1e6:.1f}"
            for ns, share in zip(row.times_ns, shares, strict=True)
        ]
        table.add_row(row.label, *cells, style=style)
    for label, cells in last_rows_of([(step, rank) for _, step, rank in columns]):
        table.add_row(label, *cells)
    return table
