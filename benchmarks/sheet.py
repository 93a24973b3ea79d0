"""The look of all figures: a white sheet of panels, a few colours, marks with their intervals, and words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from benchmarks.display import rounds_in_words

TORCH, MINDDP, SHARED, OTHERS = "#6f6f6f", "#1f5fa8", "#c8611a", "#8c7aa9"
SHARED_PALE = "#dfa06f"
TEXT, FRAME, FAINT = "#404040", "#bdbdbd", "#ececec"


HEADER_INCHES, FOOTER_INCHES, MARGIN_INCHES = 0.55, 0.25, 0.08


def sheet(title: str, panels: int, *, panel_inches: float, wide: int = 3) -> tuple[Figure, list[Axes]]:
    """A figure of `panels` panels, at most `wide` of them in a row, each `panel_inches` high."""
    columns, rows = min(panels, wide), math.ceil(panels / wide)
    width = 1.8 + 2.7 * max(columns, 2)  # the footnote needs it
    height = HEADER_INCHES + FOOTER_INCHES + rows * (panel_inches + 0.55)
    between = (0, FOOTER_INCHES / height, 1, 1 - (HEADER_INCHES + FOOTER_INCHES) / height)
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(rect=between))
    figure.text(MARGIN_INCHES / width, 1 - 0.19 / height, title, va="center", fontsize=10.5, color=TEXT)
    axes: list[Axes] = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in axes[panels:]:
        unused.remove()
    for panel in axes[:panels]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(FRAME)
        panel.tick_params(labelsize=7.5, color=FRAME, labelcolor=TEXT)
        panel.xaxis.label.set(fontsize=8, color=TEXT)
        panel.yaxis.label.set(fontsize=8, color=TEXT)
    return figure, axes[:panels]


def titled(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=8.5, color=TEXT)


def key(figure: Figure, colours: Mapping[str, str]) -> None:
    """Below the title, words in the colours that they stand for."""
    width, height = figure.get_size_inches()
    words = figure.legend(
        [Line2D([], [], linestyle="none") for _ in colours],
        list(colours),
        labelcolor=list(colours.values()),
        loc="center left",
        bbox_to_anchor=(MARGIN_INCHES / width, 1 - 0.42 / height),
        ncols=len(colours),
        frameon=False,
        fontsize=8.5,
        handlelength=0,
        handletextpad=0,
        columnspacing=1.5,
        borderpad=0,
        borderaxespad=0,
    )
    words.set_in_layout(False)


def footnote(figure: Figure, report: Mapping[str, Any], note: str = "") -> None:
    """How it was measured, and on what."""
    machine, config = report["machine"], report["config"]
    ranks = config.get("world_size", 1)
    said = [
        note or f"medians and 95% intervals of {rounds_in_words(config)}, paired",
        f"{ranks} rank{'s' if ranks > 1 else ''} on one host",
        f"{machine['cores']:g} cores of {machine['cpu']}, {machine['os']}",
        f"torch {machine['torch']}, Python {machine['python']}",
    ]
    width, height = figure.get_size_inches()
    figure.text(MARGIN_INCHES / width, 0.12 / height, "; ".join(said), va="center", fontsize=6.5, color=TORCH)


# ------------------------------------------------------------------ marks


def across(axes: Axes, estimate: Mapping[str, float], row: float, colour: str, *, hollow: bool = False) -> None:
    """A median and its interval along x."""
    axes.plot([estimate["low"], estimate["high"]], [row, row], color=colour, linewidth=1.6, alpha=0.5)
    inside = "white" if hollow else colour
    axes.plot(estimate["median"], row, "o", color=colour, markerfacecolor=inside, markersize=4)


def upright(axes: Axes, estimate: Mapping[str, float], x: float, colour: str) -> None:
    """A median and its interval along y."""
    axes.plot([x, x], [estimate["low"], estimate["high"]], color=colour, linewidth=1.6, alpha=0.5)
    axes.plot(x, estimate["median"], "o", color=colour, markersize=4)


def beside(axes: Axes, text: str, x: float, y: float, colour: str, size: float) -> None:
    """A label to the right of a point."""
    axes.annotate(
        text, (x, y), (5, 0), textcoords="offset points", va="center_baseline", color=colour, fontsize=size
    )


def rows_of(panels: Sequence[Axes], names: Sequence[str]) -> None:
    """A row for each name, the first on top; named once for all panels beside each other."""
    for axes in panels:
        place = axes.get_subplotspec()
        is_leftmost = place is not None and place.is_first_col()
        axes.set_yticks(range(len(names)), list(names) if is_leftmost else [""] * len(names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)


def unit(panels: Sequence[Axes], text: str) -> None:
    """What the figures below the panels are, once for each column."""
    for number, axes in enumerate(panels):
        place = axes.get_subplotspec()
        columns = place.get_gridspec().ncols if place is not None else 1
        if number + columns >= len(panels):
            axes.set_xlabel(text)


def on_one_scale(panels: Sequence[Axes]) -> None:
    """So that panels can be compared."""
    low = min(axes.get_xlim()[0] for axes in panels)
    high = max(axes.get_xlim()[1] for axes in panels)
    for axes in panels:
        axes.set_xlim(low, high)
        axes.grid(axis="x", color=FAINT)
        axes.set_axisbelow(True)


# ------------------------------------------------------------------ who, and in which colour


def everybody(workloads: Iterable[Mapping[str, Any]]) -> list[str]:
    """The contestants of any workload, but of the paired settings only the first two."""
    names = dict.fromkeys(name for result in workloads for name in result["contestants"])
    left_out = ("static", "batched", "views_static")
    return [name for name in names if setting_of(name) not in left_out and not name.endswith(", auto")]


def setting_of(name: str) -> str:
    """Of "minddp views, shared memory" the "views"."""
    return name.partition(" ")[2].partition(",")[0]


def words_of(setting: str) -> str:
    """Of "views_static" what it is made of."""
    return setting.replace("_", ", ")


def colour_of(name: str) -> str:
    if "shared memory" in name:
        return SHARED
    return {"torch": TORCH, "minddp": MINDDP}.get(name.split()[0], OTHERS)
