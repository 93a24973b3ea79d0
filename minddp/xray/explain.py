"""A recording in the terminal: a table, and what it means in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from minddp.xray import words
from minddp.xray.analysis import Analysis
from minddp.xray.timeline import Activity, RankStep, Step

# What the columns add up to: a step.
COLUMNS = {
    "forward": (Activity.FORWARD, Activity.BUFFERS, Activity.REBUILD),
    "loss": (Activity.LOSS,),
    "backward": (Activity.BACKWARD,),
    "exposed\ncommunication": (Activity.EXPOSED,),
    "copy\nback": (Activity.COPY_BACK,),
    "optimizer": (Activity.OPTIMIZER,),
    "rest": (Activity.OTHER,),
}


def explain(analysis: Analysis, console: Console) -> None:
    """The typical step: where its time goes, what hurts most, and what to do about it."""
    step = analysis.typical
    console.print(f"[bold]{words.headline(step)}[/bold]", highlight=False)
    console.print(table_of([(f"rank {rank.rank}", step, rank) for rank in step.ranks], "milliseconds"))
    if step.complete:
        for sentence in (words.overlap_sentence(step), words.worst_sentence(step)):
            _say(console, sentence)
        _say(console, f"What to try: {words.suggestion(step, analysis.plans)}")
    _facts(console, analysis)


def explain_several(analyses: Sequence[Analysis], console: Console) -> None:
    """The typical steps of several recordings, one below the other."""
    rows = [
        (f"{analysis.recording.title}, rank {rank.rank}", analysis.typical, rank)
        for analysis in analyses
        for rank in analysis.typical.ranks
    ]
    console.print(table_of(rows, "milliseconds; of each recording the step of median length"))
    for analysis in analyses:
        layout = analysis.typical.layout
        messages = f"{words.count(len(layout.buckets), 'message')} of {words.size(layout.nbytes)} in all"
        _say(console, f"{analysis.recording.title}: {words.ms(analysis.typical.length_ns)} a step, {messages}.")


def table_of(rows: Sequence[tuple[str, Step, RankStep]], title: str) -> Table:
    table = Table(caption=title, caption_justify="left", caption_style="dim")
    table.add_column("")
    table.add_column("step", justify="right", style="bold")
    for heading in COLUMNS:
        style = "red" if Activity.EXPOSED in COLUMNS[heading] else ""
        table.add_column(f"{'=' if heading == 'forward' else '+'} {heading}", justify="right", style=style)
    table.add_column("communication\nhidden", justify="right")
    for name, step, rank in rows:
        parts = [sum(rank.parts_ns[activity] for activity in part) for part in COLUMNS.values()]
        cells = [f"{ns / 1e6:.2f}" for ns in (rank.length_ns, *parts)]
        table.add_row(name, *cells, words.percent(step.overlap(rank)))
    return table


def _facts(console: Console, analysis: Analysis) -> None:
    count = words.count(len(analysis.steps), "step")
    which = f"This is step {analysis.typical.number}, the median of {count}. " if len(analysis.steps) > 1 else ""
    _say(console, which + " ".join(words.facts(analysis.recording)), style="dim")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False)
