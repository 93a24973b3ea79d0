"""The typical step as a still picture, for a README: the first view of the page, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minddp.platform.wording import size
from minddp.xray import words
from minddp.xray.analysis import Analysis
from minddp.xray.timeline import Activity, RankStep, Step
from minddp.xray.waits import stretches_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# As in page.css: computing is blue, communication is green while it is hidden and red where it is exposed; what
# moves is solid, and what waits is hatched.
INK, SOFT, LINE, FAINT = "#1b1d21", "#5a606a", "#e2e2dd", "#f0f0ec"
WIRE, EXPOSED, EXPOSED_PALE = "#17775f", "#c23b1e", "#fce8e1"
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
STANDS_STILL: dict[str, Any] = {"facecolor": EXPOSED_PALE, "edgecolor": EXPOSED, "linewidth": 0.9}
MOVES: dict[str, Any] = {"facecolor": WIRE, "edgecolor": "white", "linewidth": 0.6}
MOVES_EXPOSED: dict[str, Any] = MOVES | {"facecolor": EXPOSED}
WAITS: dict[str, Any] = {"facecolor": "white", "edgecolor": WIRE, "hatch": "/////", "linewidth": 0}
STYLES = {  # of a stretch, by whether it moves and whether it is exposed
    (True, False): MOVES,
    (True, True): MOVES_EXPOSED,
    (False, False): WAITS,
    (False, True): WAITS | {"edgecolor": EXPOSED},
}
COMPUTES, TICKS, SENDS = 0.0, 0.36, 0.56  # where they begin within a rank's row of height 1
INCHES_PER_RANK, WIDTH_INCHES, TITLE_INCHES, KEY_INCHES = 0.86, 11.0, 0.82, 0.62
HEADING = 0.62  # of a rank's row
LABEL_MARGIN = 0.01  # of the width of the picture


def save_picture(analyses: Sequence[Analysis], path: Path) -> None:
    """Write a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(f"{path} is drawn by matplotlib: pip install 'minddp[bench]'.")
    drawn(analyses).savefig(path, dpi=120)


def drawn(analyses: Sequence[Analysis]) -> Figure:
    """The typical step of each recording, one below the other on one scale."""
    from matplotlib.figure import Figure

    steps = [analysis.typical for analysis in analyses]
    rows = sum(len(step.ranks) for step in steps)
    headings = len(steps) if len(steps) > 1 else 0
    height = INCHES_PER_RANK * (rows + HEADING * headings) + TITLE_INCHES + KEY_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, height), facecolor="white")
    axes: Any = figure.add_axes((0.075, KEY_INCHES / height, 0.91, 1 - (TITLE_INCHES + KEY_INCHES) / height))
    longest_ms = max((step.end_ns - step.begin_ns) / 1e6 for step in steps)
    recordings = [analysis.recording for analysis in analyses]
    y = 0.0
    for name, step in zip(words.names(recordings), steps, strict=True):
        if headings:
            heading = f"{name}: {words.ms(step.length_ns)}"
            axes.text(0, y + 0.42, heading, color=INK, fontsize=10, weight="bold", va="center")
            y += HEADING
        for rank in step.ranks:
            _draw_rank(axes, step, rank, y, longest_ms)
            y += 1
    _frame(axes, y, longest_ms)
    title = words.headline(steps[0]) if len(steps) == 1 else "One step of each, on one scale"
    figure.text(0.012, 1 - 0.14 / height, title, fontsize=13, weight="bold", color=INK, va="top")
    figure.text(0.012, 1 - 0.39 / height, words.setting(recordings), fontsize=8, color=SOFT, va="top")
    _key(figure)
    return figure


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
        """A box with the first of `labels` that fits into it, if any."""
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
            box(span.begin_ns, span.end_ns, COMPUTES, ["stands still", "waits"], EXPOSED, **STANDS_STILL)
        else:
            color = "white" if span.activity is Activity.BACKWARD else INK
            style = {"facecolor": FILL[span.activity], "edgecolor": "white", "linewidth": 0.6}
            box(span.begin_ns, span.end_ns, COMPUTES, [span.activity.value], color, **style)
    ticks = [at(t_ns) for t_ns in rank.ready_ns.values()]
    axes.vlines(ticks, top + TICKS, top + TICKS + 0.13, color=SOFT, linewidth=0.7)
    axes.broken_barh([(0, longest_ms)], (top + SENDS, 0.32), facecolor=FAINT)
    if rank.gradients_complete_ns is not None:
        end = at(rank.gradients_complete_ns)
        axes.vlines(end, top - 0.06, top + SENDS + 0.38, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=3)
    for bucket in rank.buckets:
        labels = (f"{bucket.index}: {size(bucket.nbytes)}", f"{bucket.index}")
        stretches = stretches_of(step, rank, bucket.index)
        longest = max((s for s in stretches if s.moves), key=lambda s: s.length_ns, default=None)
        for stretch in stretches:
            shown = labels if stretch is longest else ()
            style = STYLES[stretch.moves, stretch.exposed]
            box(stretch.begin_ns, stretch.end_ns, SENDS, shown, "white", **style)


def _key(figure: Any) -> None:
    """In the terms of the page. Columns are filled from above."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    signs: list[Any] = [
        Patch(facecolor=FILL[Activity.FORWARD], label="forward"),
        Patch(**MOVES, label="on the wire, hidden"),
        Patch(facecolor=FILL[Activity.BACKWARD], label="backward"),
        Patch(**MOVES_EXPOSED, label="on the wire, exposed"),
        Patch(**STANDS_STILL, label="stands still"),
        Patch(**WAITS, label="waits for other ranks"),
        Patch(facecolor=FILL[Activity.COPY_BACK], label="loss, copy back"),
        Line2D([], [], color=SOFT, marker="|", linestyle="", label="a gradient is ready"),
        Patch(facecolor=FILL[Activity.OPTIMIZER], label="optimizer"),
        Line2D([], [], color=INK, linewidth=0.9, linestyle=(0, (2, 2)), label="backward ends"),
        Patch(facecolor=FILL[Activity.OTHER], label="other"),
    ]
    figure.legend(
        handles=signs,
        loc="lower left",
        bbox_to_anchor=(0.005, 0.0),
        ncols=(len(signs) + 1) // 2,
        frameon=False,
        fontsize=8,
        labelcolor=SOFT,
        handlelength=1.3,
        columnspacing=1.3,
    )
