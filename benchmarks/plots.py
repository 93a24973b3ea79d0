"""Draw the results: PNGs for the questions that have been answered, and all tables as Markdown.

    python -m benchmarks plots    # or `make plots`; needs matplotlib, which the `bench` extra has

Points are medians, bars their 95% bootstrap intervals. Everything is read from the JSON files; nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from benchmarks import (
    all_reduce,
    bucket_size,
    faults,
    fewer_bytes,
    growth,
    parts,
    question,
    scaling,
    versus_torch,
)
from benchmarks.contestants import BASELINE, FLOOR, candidate
from benchmarks.display import Table
from benchmarks.question import Report

DPI = 160
SMOOTHED_STEPS = 25
TORCH, MINDDP, SHARED = "#6f6f6f", "#1f5fa8", "#c8611a"
TEXT, FRAME = "#404040", "#bdbdbd"

Panel = tuple[str, str, Sequence[tuple[Mapping[int, Any], str]]]  #: the labels of both axes, and curves in colours


@dataclass(frozen=True)
class Config:
    """Draw the figures and write the tables, beside the JSON files that they are made from."""

    directory: Path = question.RESULTS


def main(config: Config) -> None:
    pages: list[str] = []
    for name, tables in TABLES.items():
        report = question.read(question.path_of(name, config.directory))
        if report is None:
            print(f"{name}: not measured yet")
            continue
        pages += [f"## {name}", f"{provenance(report)}.", *(table.markdown() for table in tables(report))]
        draw(name, report, config.directory)
    (config.directory / "tables.md").write_text("\n\n".join(pages) + "\n")
    print("tables: tables.md")


def draw(asked: str, report: Report, directory: Path) -> None:
    """All pictures of the answer to the question `asked`."""
    for name, picture in PICTURES.get(asked, {}).items():
        picture(report).savefig(directory / f"{name}.png", dpi=DPI, facecolor="white")
        print(f"{asked}: {name}.png")


def provenance(report: Report) -> str:
    machine, config = report["machine"], report["config"]
    counts = rounds_of({part: of for part, of in report.items() if part != "config"})
    rounds = (
        f"{' to '.join(map(str, sorted({min(counts), max(counts)})))} rounds, paired"
        if counts
        else "counted, not timed"
    )
    rounds += f"; a {config['size']} look" if config["size"] != "full" else ""
    hosts = "two hosts" if "rates" in config else "one host"
    ranks = f"{config.get('world_size', 1)} rank{'s' if config.get('world_size', 1) > 1 else ''} on {hosts}"
    where = f"{machine['cores']:g} cores of {machine['cpu']}, {machine['os']}"
    return f"{rounds}; {ranks}; {where}; torch {machine['torch']}, Python {machine['python']}"


def rounds_of(answers: Any) -> set[int]:
    """The numbers of rounds that were measured, wherever in a report they stand."""
    if isinstance(answers, list):
        return set().union(*map(rounds_of, answers))
    if not isinstance(answers, Mapping):
        return set()
    own = {answers["rounds"]} if isinstance(answers.get("rounds"), int) else set()
    return own.union(*map(rounds_of, answers.values()))


# ------------------------------------------------------------------ the pictures


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


def growths(report: Report) -> Figure:
    """The time and memory that a wrapper adds: a panel for each axis."""
    panels: dict[str, Panel] = {}
    for axis, points in report["axes"].items():
        names = list(next(iter(points.values())))
        lines = [({int(x): of[name]["added"] for x, of in points.items()}, colour_of(name)) for name in names]
        theory = {int(x): of[names[0]]["theory"] for x, of in points.items()}
        up = "MiB per rank" if axis == "memory" else "ms per step"
        panels[axis] = ("elements" if axis == "memory" else axis, up, [*lines, (theory, TEXT)])
    title = "What a wrapper adds to a step without one, and to memory"
    return curves(title, WRAPPERS | {"- - theory, from torch's": TEXT}, panels, report)


def scalings(report: Report) -> Figure:
    """Speed-up over one rank without a wrapper: a panel for weak, one for strong scaling."""
    panels: dict[str, Panel] = {
        f"{kind} scaling": (
            "ranks",
            "speed-up",
            [(speedups(of, name == scaling.FORECAST), colour_of(name)) for name, of in by_name.items()],
        )
        for kind, by_name in report["kinds"].items()
    }
    key = {FLOOR: TEXT} | WRAPPERS | {"- - forecast by the process group": MINDDP}
    return curves(f"{report['title']}: speed-up over one rank alone", key, panels, report)


def speedups(of: Mapping[str, Report], is_theory: bool) -> Mapping[int, Any]:
    return {int(x): at["speedup"]["median"] if is_theory else at["speedup"] for x, at in of.items()}


WRAPPERS = {"torch": TORCH, "minddp by the process group": MINDDP, "as it comes": SHARED}


def colour_of(name: str) -> str:
    by_group = {candidate("default"): MINDDP, scaling.FORECAST: MINDDP}
    return ({FLOOR: TEXT, BASELINE: TORCH} | by_group).get(name, SHARED)


def curves(title: str, key: Mapping[str, str], panels: Mapping[str, Panel], report: Report) -> Figure:
    """All axes logarithmic; an estimate's interval as a bar, theory, which is plain numbers, as a dashed line."""
    figure = Figure(figsize=(1 + 2.9 * max(len(panels), 2), 3.6), layout="constrained")
    for axes, (name, (across, up, lines)) in zip(
        figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True
    ):
        frame(axes, name)
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel(across, fontsize=8, color=TEXT)
        axes.set_ylabel(up, fontsize=8, color=TEXT)
        for points, colour in lines:
            of_theory = not isinstance(next(iter(points.values())), Mapping)
            for x, of in () if of_theory else points.items():
                axes.plot([x, x], [of["low"], of["high"]], color=colour, linewidth=1.6, alpha=0.5)
            medians = [of if of_theory else of["median"] for of in points.values()]
            axes.plot(list(points), medians, "--" if of_theory else "o-", color=colour, markersize=3.5, linewidth=1)
        ticks = sorted({x for points, _ in lines for x in points})
        axes.set_xticks(ticks, [f"{tick:,.0f}" if tick < 1e4 else f"{tick / 1e3:,.0f}k" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        low, high = axes.get_ylim()
        axes.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else NullFormatter())
    explain(figure, title, key, report)
    return figure


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


def losses(report: Report) -> Figure:
    """For `fewer_bytes`: the loss of training, as a running mean, over bytes and over time at each rate."""
    rates = report["config"]["rates"]
    figure = Figure(figsize=(3.2 * (1 + len(rates)), 3.4), layout="constrained")
    panels = figure.subplots(1, 1 + len(rates), sharey=True)
    for name, of in report["hooks"].items():
        width = min(SMOOTHED_STEPS, len(of["curve"]))
        loss = np.convolve(of["curve"], np.ones(width) / width, mode="valid")
        steps = np.arange(width, len(of["curve"]) + 1)
        for axes, each in zip(panels, [of["bytes"] / 1e6, *(of[rate]["ms"] / 1e3 for rate in rates)], strict=True):
            axes.plot(steps * each, loss, linewidth=1.2, label=name)
    for axes, label in zip(panels, ["MB sent by a host", *(f"seconds at {rate}" for rate in rates)], strict=True):
        axes.set(xlabel=label, xscale="log" if axes is panels[0] else "linear")
    panels[0].set_ylabel("loss of training")
    panels[0].legend(fontsize=7, frameon=False)
    figure.supxlabel(provenance(report), x=0.01, ha="left", fontsize=6.5, color=TORCH)
    return figure


PICTURES: Mapping[str, Mapping[str, Callable[[Report], Figure]]] = {
    "versus_torch": {"ratio": ratios},
    "growth": {"growth": growths},
    "scaling": {"scaling": scalings},
    "fewer_bytes": {"fewer_bytes": losses},
}
TABLES: Mapping[str, Callable[[Report], Iterable[Table]]] = {
    "versus_torch": versus_torch.tables,
    "bucket_size": bucket_size.tables,
    "growth": growth.tables,
    "scaling": scaling.tables,
    "all_reduce": all_reduce.tables,
    "parts": parts.tables,
    "faults": faults.tables,
    "fewer_bytes": fewer_bytes.tables,
}
