"""The typical step as a still picture, for a README: what the page shows first, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minddp.xray import words
from minddp.xray.analysis import Analysis
from minddp.xray.timeline import Activity, RankStep, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# As in page.css: computing is blue, communication is green while it is hidden and red where it is not.
INK, SOFT, LINE, FAINT = "#1b1d21", "#5a606a", "#e2e2dd", "#f0f0ec"
WIRE, EXPOSED, EXPOSED_PALE = "#17775f", "#bf4620", "#fbe9e2"
FILL = {
    Activity.FORWARD: "#7093c4",
    Activity.BUFFERS: "#94aed3",
    Activity.REBUILD: "#94aed3",
    Activity.LOSS: "#c9ced6",
    Activity.BACKWARD: "#34599a",
    Activity.COPY_BACK: "#c9ced6",
    Activity.OPTIMIZER: "#8f83ba",
    Activity.OTHER: "#e6e6e1",
}
STANDS_STILL: dict[str, Any] = {"facecolor": EXPOSED_PALE, "edgecolor": EXPOSED, "hatch": "////", "linewidth": 0}
COMPUTES, TICKS, SENDS = 0.0, 0.36, 0.56  # where they begin within a rank's row of height 1
INCHES_PER_RANK, WIDTH_INCHES, HEADING = 0.86, 11.0, 0.62
LABEL_MARGIN = 0.01  # of the width of the picture


def save_picture(analyses: Sequence[Analysis], path: Path) -> None:
    """Write a PNG, or whatever matplotlib makes of the suffix.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path} is drawn by matplotlib: pip install 'minddp[bench]'.") from error

    steps = [analysis.typical for analysis in analyses]
    rows = sum(len(step.ranks) for step in steps)
    headings = len(steps) if len(steps) > 1 else 0
    height = INCHES_PER_RANK * (rows + HEADING * headings) + 1.25
    figure = Figure(figsize=(WIDTH_INCHES, height), facecolor="white")
    axes: Any = figure.add_axes((0.075, 0.62 / height, 0.91, 1 - 1.2 / height))
    longest_ms = max((step.end_ns - step.begin_ns) / 1e6 for step in steps)
    y = 0.0
    for analysis, step in zip(analyses, steps, strict=True):
        if headings:
            axes.text(0, y + 0.42, _heading(analysis, step), color=INK, fontsize=10, weight="bold", va="center")
            y += HEADING
        for rank in step.ranks:
            _draw_rank(axes, step, rank, y, longest_ms)
            y += 1
    _frame(axes, y, longest_ms)
    title = words.headline(steps[0]) if len(steps) == 1 else "One step of each, on one scale"
    figure.text(0.012, 1 - 0.16 / height, title, fontsize=13, weight="bold", color=INK, va="top")
    _key(figure)
    figure.savefig(path, dpi=120)


def _heading(analysis: Analysis, step: Step) -> str:
    return f"{analysis.recording.title}: {words.ms(step.length_ns)}"


def _frame(axes: Axes, height: float, longest_ms: float) -> None:
    axes.set_xlim(0, longest_ms)
    axes.set_ylim(height - 0.1, -0.12)
    axes.set_yticks([])
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0, labelcolor=SOFT, labelsize=8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} ms")
    axes.grid(axis="x", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_rank(axes: Axes, step: Step, rank: RankStep, top: float, longest_ms: float) -> None:
    def at(t_ns: int) -> float:
        return (t_ns - step.begin_ns) / 1e6

    def box(begin_ns: int, end_ns: int, place: float, labels: Sequence[str], color: str, **style: Any) -> None:
        """With the first of `labels` that fits into it, if any."""
        width = at(end_ns) - at(begin_ns)
        axes.broken_barh([(at(begin_ns), width)], (top + place, 0.32), **style)
        fitting = [label for label in labels if width > longest_ms * (0.006 * len(label) + LABEL_MARGIN)]
        if fitting:
            centre = (at(begin_ns) + width / 2, top + place + 0.165)
            axes.text(*centre, fitting[0], color=color, fontsize=8, ha="center", va="center")

    for place, text, color in ((COMPUTES, f"rank {rank.rank}", INK), (SENDS, "sends", SOFT)):
        beside = (-0.008 * longest_ms, top + place + 0.16)
        axes.text(*beside, text, color=color, fontsize=9, ha="right", va="center")
    for span in rank.spans:
        if span.activity is Activity.EXPOSED:
            box(span.begin_ns, span.end_ns, COMPUTES, [], INK, **STANDS_STILL)
        else:
            color = "white" if span.activity is Activity.BACKWARD else INK
            style = {"facecolor": FILL[span.activity], "edgecolor": "white", "linewidth": 0.6}
            box(span.begin_ns, span.end_ns, COMPUTES, [span.activity.value], color, **style)
    ticks = [at(t_ns) for t_ns in rank.ready_ns.values()]
    axes.vlines(ticks, top + TICKS, top + TICKS + 0.13, color=SOFT, linewidth=0.7)
    axes.broken_barh([(0, longest_ms)], (top + SENDS, 0.32), facecolor=FAINT)
    for bucket in rank.buckets:
        wire = step.on_the_wire(bucket.index, rank)
        if wire is None:
            continue
        labels = (f"{bucket.index}: {words.size(bucket.nbytes)}", f"{bucket.index}")
        split_ns = wire.begin_ns + bucket.hidden_ns(wire)
        longer = max(split_ns - wire.begin_ns, wire.end_ns - split_ns)
        for begin_ns, end_ns, fill in ((wire.begin_ns, split_ns, WIRE), (split_ns, wire.end_ns, EXPOSED)):
            if end_ns > begin_ns:
                shown = labels if end_ns - begin_ns == longer else ()
                box(begin_ns, end_ns, SENDS, shown, "white", facecolor=fill, edgecolor="white", linewidth=0.6)


def _key(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    signs: list[Any] = [
        Patch(facecolor=FILL[Activity.FORWARD], label="forward"),
        Patch(facecolor=FILL[Activity.BACKWARD], label="backward"),
        Line2D([], [], color=SOFT, marker="|", linestyle="", label="a gradient is there"),
        Patch(facecolor=WIRE, label="bucket on the wire during backward"),
        Patch(facecolor=EXPOSED, label="on the wire after it"),
        Patch(**STANDS_STILL, label="rank stands still"),
        Patch(facecolor=FILL[Activity.COPY_BACK], label="loss, copying back"),
        Patch(facecolor=FILL[Activity.OPTIMIZER], label="optimizer"),
    ]
    figure.legend(
        handles=signs,
        loc="lower left",
        bbox_to_anchor=(0.005, 0.0),
        ncols=len(signs),
        frameon=False,
        fontsize=8,
        labelcolor=SOFT,
        handlelength=1.3,
        columnspacing=1.3,
    )
