"""Draw the results: a PNG for `versus_torch`, and the tables of all questions as Markdown.

    python -m benchmarks plots    # or `make plots`; needs matplotlib, which the `bench` extra has

Points are medians, bars their 95% bootstrap intervals. Everything is read from the JSON files; nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks import (
    bucket_size,
    collectives,
    faults,
    fewer_bytes,
    growth,
    parts,
    question,
    scaling,
    versus_torch,
)
from benchmarks.contestants import candidate
from benchmarks.display import Table
from benchmarks.question import Report

DPI = 160
TORCH, MINDDP, SHARED = "#6f6f6f", "#1f5fa8", "#c8611a"
TEXT, FRAME = "#404040", "#bdbdbd"


@dataclass(frozen=True)
class Config:
    """Draw the figure and write the tables, beside the JSON files that they are made from."""

    directory: Path = question.RESULTS


def main(config: Config) -> None:
    pages: list[str] = []
    for name, tables in TABLES.items():
        report = question.read(question.path_of(name, config.directory))
        if report is None:
            print(f"{name}: not measured yet")
            continue
        pages += [f"## {name}", f"{provenance(report)}.", *(table.markdown() for table in tables(report))]
        if name == "versus_torch":
            ratios(report).savefig(config.directory / "ratio.png", dpi=DPI, facecolor="white")
    (config.directory / "tables.md").write_text("\n\n".join(pages) + "\n")
    print("tables: tables.md")


def provenance(report: Report) -> str:
    machine, config = report["machine"], report["config"]
    size = f"{config['size']} size" if config["size"] != "full" else f"{config.get('rounds', 1)} rounds"
    where = f"{machine['cores']:g} cores of {machine['cpu']}, {machine['os']}"
    versions = f"torch {machine['torch']}, Python {machine['python']}"
    return f"{size}; {config.get('world_size', 1)} ranks; {where}; {versions}"


# ------------------------------------------------------------------ the picture


def ratios(report: Report) -> Figure:
    """Beside torch at equal settings: one panel for each workload, a row for each setting."""
    settings, workloads = report["config"]["settings"], list(report["workloads"].values())
    columns, lines = min(len(workloads), 3), math.ceil(len(workloads) / 3)
    size = (1.8 + 2.7 * max(columns, 2), 1.1 + lines * (0.6 + 0.34 * len(settings)))
    figure = Figure(figsize=size, layout="constrained")
    panels: list[Axes] = figure.subplots(lines, columns, squeeze=False, sharex=True).flatten().tolist()
    for unused in panels[len(workloads) :]:
        unused.remove()
    for number, (axes, result) in enumerate(zip(panels, workloads, strict=False)):
        frame(axes, result["title"])
        axes.axvline(1, color=TORCH, linewidth=1)
        axes.tick_params(axis="y", length=0)
        names = [setting.replace("_", ", ") if number % columns == 0 else "" for setting in settings]
        axes.set_yticks(range(len(settings)), names)
        axes.set_ylim(len(settings) - 0.5, -0.5)
        if number + columns >= len(workloads):
            axes.set_xlabel("multiple of torch's time", fontsize=8, color=TEXT)
        for row, setting in enumerate(settings):
            draw_row(axes, row, setting, result["contestants"], report["config"]["transports"])
    title = "Time of a training step relative to torch's DDP at the same setting: less is faster"
    key = {"● minddp by the process group": MINDDP, "● by shared memory": SHARED, "○ as it comes": SHARED}
    explain(figure, title, key, report)
    return figure


def draw_row(axes: Axes, row: int, setting: str, contestants: Report, transports: Sequence[str]) -> None:
    """The ratios at one setting, below each other."""
    by_transport = {t: contestants.get(candidate(setting, t)) for t in transports}
    marks = {transport: of["ratio"] for transport, of in by_transport.items() if of is not None}
    for place, (transport, ratio) in enumerate(marks.items()):
        y = row + 0.5 * (place - (len(marks) - 1) / 2) / max(len(marks), 2)
        colour = MINDDP if transport == "process_group" else SHARED
        axes.plot([ratio["low"], ratio["high"]], [y, y], color=colour, linewidth=1.6, alpha=0.5)
        inside = "white" if transport == "auto" else colour
        axes.plot(ratio["median"], y, "o", color=colour, markerfacecolor=inside, markersize=4)


def frame(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=8.5, color=TEXT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FRAME)
    axes.grid(axis="x", color="#ececec")
    axes.tick_params(labelsize=7.5, color=FRAME, labelcolor=TEXT, labelbottom=True)


def explain(figure: Figure, title: str, key: Mapping[str, str], report: Report) -> None:
    figure.legend(
        [Line2D([], [], linestyle="none") for _ in key],
        list(key),
        title=title,
        title_fontproperties={"size": 10.5},
        alignment="left",
        labelcolor=list(key.values()),
        loc="outside upper left",
        ncols=len(key),
        frameon=False,
        fontsize=8.5,
        handlelength=0,
        handletextpad=0,
        borderpad=0,
    )
    figure.supxlabel(provenance(report), x=0.01, ha="left", fontsize=6.5, color=TORCH)


TABLES: Mapping[str, Callable[[Report], Iterable[Table]]] = {
    "versus_torch": versus_torch.tables,
    "bucket_size": bucket_size.tables,
    "growth": growth.tables,
    "scaling": scaling.tables,
    "collectives": collectives.tables,
    "parts": parts.tables,
    "faults": faults.tables,
    "fewer_bytes": fewer_bytes.tables,
}
