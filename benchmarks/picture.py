"""The typical step of an x-ray as a still picture, for a README: the first view of its page, drawn by matplotlib.

python -m benchmarks.picture step.json step.png    # what `minddp xray` or `x.save` has written
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minddp.platform.wording import size
from minddp.tools.xray import words
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.result import Result, load
from minddp.tools.xray.timeline import Activity, RankStep, RecordedStep

# The colours of page.css. A bucket is solid while its bytes move, and hatched while it waits.
WIRE, EXPOSED, EXPOSED_PALE = "#17775f", "#c23b1e", "#fce8e1"
FILL = {
    Activity.FORWARD: "#7093c4",
    Activity.BUFFERS: "#94aed3",
    Activity.LOSS: "#c9ced6",
    Activity.BACKWARD: "#34599a",
    Activity.EXPOSED: EXPOSED_PALE,
    Activity.COPY_BACK: "#c9ced6",
    Activity.OPTIMIZER: "#8f83ba",
    Activity.OTHER: "#e6e6e1",
}
STYLES: dict[tuple[bool, bool], tuple[str, dict[str, Any]]] = {  # of a stretch: it moves, it is exposed
    (True, False): ("on the wire, hidden", {"facecolor": WIRE, "edgecolor": "white", "linewidth": 0.8}),
    (True, True): ("on the wire, exposed", {"facecolor": EXPOSED, "edgecolor": "white", "linewidth": 0.8}),
    (False, False): ("waits for ranks, hidden", {"facecolor": "white", "edgecolor": WIRE, "hatch": "/////"}),
    (False, True): ("waits for ranks, exposed", {"facecolor": "white", "edgecolor": EXPOSED, "hatch": "/////"}),
}
TICKS, SENDS, BAR = 0.36, 0.56, 0.32  # places and a height within a rank's row of height 1
WIDTH_INCHES, INCHES_PER_ROW = 11.0, 0.86
LETTER = 0.007  # of the picture's width


def main(recording: Path, picture: Path) -> None:
    """Draw the recording in a .json file."""
    save_picture([load(recording)], picture)


def save_picture(shown: Sequence[Result], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn([result.analysis for result in shown]).savefig(path, dpi=120)


def drawn(analyses: Sequence[Analysis]) -> Figure:
    """The typical step of each recording, one below the other on one scale."""
    steps = [analysis.typical for analysis in analyses]
    rows = sum(len(step.ranks) for step in steps)
    height = INCHES_PER_ROW * (rows + 2)
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    axes = figure.add_subplot(xlim=(0, max((step.end_ns - step.begin_ns) / 1e6 for step in steps)), ylim=(rows, 0))
    labels: list[str] = []
    for analysis, step in zip(analyses, steps, strict=True):
        for rank in step.ranks:
            _draw_rank(axes, step, rank, len(labels))
            name = "" if len(steps) == 1 else f"{analysis.recording.title}\n"
            labels.append(f"{name}rank {rank.rank}")
    axes.set_yticks([row + SENDS / 2 + BAR / 2 for row in range(rows)], labels)
    axes.tick_params(length=0)
    axes.set_xlabel("milliseconds")
    axes.set_frame_on(False)
    axes.grid(axis="x", color="#e2e2dd")
    axes.set_axisbelow(True)
    title = "One step of each, on one scale"
    if len(steps) == 1:
        title = f"{words.headline(steps[0])}\n{words.setting(analyses[0].recording)}"
    axes.set_title(title, loc="left", wrap=True)
    figure.legend(handles=_key(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _draw_rank(axes: Axes, step: RecordedStep, rank: RankStep, top: float) -> None:
    def at(t_ns: int) -> float:
        return (t_ns - step.begin_ns) / 1e6

    def box(begin_ns: int, end_ns: int, place: float, label: str, color: str, style: dict[str, Any]) -> None:
        """A box, with its label if that fits into it."""
        begin, width = at(begin_ns), at(end_ns) - at(begin_ns)
        axes.broken_barh([(begin, width)], (top + place, BAR), **{"linewidth": 0, **style})
        if width > axes.get_xlim()[1] * LETTER * (len(label) + 1):
            centre = begin + width / 2, top + place + BAR / 2
            axes.text(*centre, label, color=color, fontsize=8, ha="center", va="center")

    for span in rank.spans:
        dark = span.activity is Activity.BACKWARD
        style = {"facecolor": FILL[span.activity]}
        box(span.begin_ns, span.end_ns, 0, span.activity.value, "white" if dark else "black", style)
    ready = [at(t_ns) for t_ns in rank.ready_ns.values()]
    axes.vlines(ready, top + TICKS, top + SENDS - 0.05, "gray", linewidth=0.7)
    axes.vlines(at(rank.gradients_complete_ns), top, top + SENDS + BAR, "black", linestyle="dotted")
    for bucket in rank.buckets:
        for begin_ns, end_ns, moves, exposed in step.stretches(bucket.index, rank):
            label = f"{bucket.index}: {size(bucket.nbytes)}" if moves else ""
            box(begin_ns, end_ns, SENDS, label, "white", STYLES[moves, exposed][1])


def _key() -> list[Any]:
    activities = {FILL[a]: a.value for a in (Activity.FORWARD, Activity.BACKWARD, Activity.OPTIMIZER)}
    activities |= {FILL[Activity.COPY_BACK]: "loss, copy averages", EXPOSED_PALE: "blocked"}
    return [
        *(Patch(color=color, label=label) for color, label in activities.items()),
        *(Patch(label=label, **{"linewidth": 0, **style}) for label, style in STYLES.values()),
        Line2D([], [], color="gray", marker="|", linestyle="", label="a gradient is ready"),
    ]


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs,))
