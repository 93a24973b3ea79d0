"""Draw what has been measured: PNGs for the questions that have been answered, and all tables as Markdown.

    python -m benchmarks.plots    # or `make plots`; needs matplotlib, which the `bench` extra has

Points are medians, bars their 95% bootstrap intervals. Everything is read from the JSON files; nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console

from benchmarks import all_reduce, bucket_size, earned, hook_cost, memory, question, versus_torch, xray_cost
from benchmarks.contestants import FLOOR, candidate
from benchmarks.display import Table
from benchmarks.question import Report

DPI = 160
TORCH, MINDDP, SHARED = "#6f6f6f", "#1f5fa8", "#c8611a"
TEXT, FRAME = "#404040", "#bdbdbd"


@dataclass(frozen=True)
class Config:
    """Draw the figures and write the tables, beside the JSON files that they are made from."""

    directory: Path = question.RESULTS


def main(config: Config) -> None:
    console, pages = Console(), list[str]()
    for name, tables in TABLES.items():
        report = question.read(question.path_of(name, config.directory))
        if report is None:
            console.print(f"{name}: not measured yet")
            continue
        pages += [f"## {name}", f"{provenance(report)}.", *(table.markdown() for table in tables(report))]
        for drawing, picture in PICTURES.get(name, {}).items():
            drawn(picture(report), report).savefig(config.directory / f"{drawing}.png", dpi=DPI, facecolor="white")
            console.print(f"{name}: {drawing}.png")
    (config.directory / "tables.md").write_text("\n\n".join(pages) + "\n")
    console.print("tables: tables.md")


def provenance(report: Report) -> str:
    machine, config = report["machine"], report["config"]
    timed = f"{'at least ' if config.get('seconds') else ''}{config.get('rounds')} rounds, paired"
    rounds = timed if "rounds" in config else "counted, not timed"
    ranks = f"{config.get('world_size', 1)} rank{'s' if config.get('world_size', 1) > 1 else ''} on one host"
    where = f"{machine['cores']:g} cores of {machine['cpu']}, {machine['os']}"
    return f"{rounds}; {ranks}; {where}; torch {machine['torch']}, Python {machine['python']}"


# ------------------------------------------------------------------ drawing


@dataclass(frozen=True)
class Mark:
    """A median with its interval."""

    estimate: Mapping[str, float]
    colour: str
    is_hollow: bool = False


@dataclass(frozen=True)
class Picture:
    """Panels beside each other, each with the same rows; `panels[title][row]` are the marks in a row.

    `key` gives the colour of each word that explains the marks; a vertical line is drawn at `line`.
    """

    title: str
    unit: str
    key: Mapping[str, str]
    panels: Mapping[str, Mapping[str, Sequence[Mark]]]
    line: float | None = None


def drawn(picture: Picture, report: Report) -> Figure:
    """At most 3 panels in a row, all on one scale; below them the rounds and the machine."""
    names = list(dict.fromkeys(name for rows in picture.panels.values() for name in rows))
    columns, lines = min(len(picture.panels), 3), math.ceil(len(picture.panels) / 3)
    marks = max(len(row) for rows in picture.panels.values() for row in rows.values())
    height = 1.1 + lines * (0.6 + len(names) * (0.1 + 0.08 * marks))
    figure = Figure(figsize=(1.8 + 2.7 * max(columns, 2), height), layout="constrained")
    panels: list[Axes] = figure.subplots(lines, columns, squeeze=False, sharex=True).flatten().tolist()
    for unused in panels[len(picture.panels) :]:
        unused.remove()
    for number, (axes, (title, rows)) in enumerate(zip(panels, picture.panels.items(), strict=False)):
        axes.set_title(title, loc="left", fontsize=8.5, color=TEXT)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FRAME)
        axes.grid(axis="x", color="#ececec")
        axes.tick_params(labelsize=7.5, color=FRAME, labelcolor=TEXT, labelbottom=True)
        axes.tick_params(axis="y", length=0)
        axes.set_yticks(range(len(names)), names if number % columns == 0 else [""] * len(names))
        axes.set_ylim(len(names) - 0.5, -0.5)
        if number + columns >= len(picture.panels):
            axes.set_xlabel(picture.unit, fontsize=8, color=TEXT)
        if picture.line is not None:
            axes.axvline(picture.line, color=TORCH, linewidth=1)
        for name, marks_of_row in rows.items():
            draw_row(axes, names.index(name), marks_of_row)
    handles = [Line2D([], [], linestyle="none") for _ in picture.key]
    figure.legend(
        handles,
        list(picture.key),
        title=picture.title,
        title_fontproperties={"size": 10.5},
        alignment="left",
        labelcolor=list(picture.key.values()),
        loc="outside upper left",
        ncols=len(picture.key),
        frameon=False,
        fontsize=8.5,
        handlelength=0,
        handletextpad=0,
        borderpad=0,
    )
    figure.supxlabel(provenance(report), x=0.01, ha="left", fontsize=6.5, color=TORCH)
    return figure


def draw_row(axes: Axes, row: int, marks: Sequence[Mark]) -> None:
    """The marks of one row, below each other."""
    for place, mark in enumerate(marks):
        y = row + 0.5 * (place - (len(marks) - 1) / 2) / max(len(marks), 2)
        span = [mark.estimate["low"], mark.estimate["high"]]
        axes.plot(span, [y, y], color=mark.colour, linewidth=1.6, alpha=0.5)
        inside = "white" if mark.is_hollow else mark.colour
        axes.plot(mark.estimate["median"], y, "o", color=mark.colour, markerfacecolor=inside, markersize=4)


# ------------------------------------------------------------------ the pictures


def ratios(report: Report) -> Picture:
    """Beside torch at equal settings: one panel for each workload, a row for each setting."""
    colours = {"process_group": MINDDP, "shared_memory": SHARED, "auto": SHARED}

    def marks(result: Report, setting: str) -> Iterator[Mark]:
        for transport in report["config"]["transports"]:
            of = result["contestants"].get(candidate(setting, transport))
            if of is not None:
                yield Mark(of["ratio"], colours[transport], is_hollow=transport == "auto")

    return Picture(
        "Time of a training step relative to torch's DDP at the same setting: less is faster",
        "multiple of torch's time",
        {"● minddp by the process group": MINDDP, "● by shared memory": SHARED, "○ as it comes": SHARED},
        {
            result["title"]: {of.replace("_", ", "): list(marks(result, of)) for of in report["config"]["settings"]}
            for result in report["workloads"].values()
        },
        line=1,
    )


def bucket_sizes(report: Report) -> Picture:
    """One panel for each workload, a row for each capacity."""

    def rows(families: Report) -> dict[str, list[Mark]]:
        colours = dict(zip(families, (TORCH, MINDDP, SHARED), strict=True))
        heats = dict.fromkeys(heat for by_heat in families.values() for heat in by_heat)
        return {
            heat: [Mark(of[heat]["over_no_wrapper"], colours[name]) for name, of in families.items() if heat in of]
            for heat in heats
        }

    return Picture(
        "Time of a training step by capacity of the buckets, bucket_cap_mb",
        f"multiple of the time with {FLOOR}",
        {"torch": TORCH, "minddp by the process group": MINDDP, "by shared memory": SHARED},
        {result["title"]: rows(result["families"]) for result in report["workloads"].values()},
    )


def hook_costs(report: Report) -> Picture:
    """One panel for each number of parameters, a row for each setting."""
    return Picture(
        "Time that a wrapper adds to a step for each parameter, nothing communicated",
        "µs per parameter and step",
        {"torch": TORCH, "minddp": MINDDP},
        {
            f"{int(count):,} parameters": {
                setting: [
                    Mark(of["added_us"], TORCH if name.startswith("torch") else MINDDP)
                    for name, of in result["contestants"].items()
                    if name.endswith(f" {setting}")
                ]
                for setting in report["config"]["settings"]
            }
            for count, result in report["counts"].items()
        },
    )


def all_reduces(report: Report) -> Picture:
    """Shared memory beside gloo: a row for each size of the message."""
    return Picture(
        f"Time of an all-reduce of {report['config']['dtype']} in shared memory relative to gloo's",
        "multiple of gloo's time",
        {"● tensor lies in shared memory, as buckets do": SHARED, "○ it is copied in and out": SHARED},
        {
            "line at 1: gloo": {
                f"tensor of {result['kib']:,g} KiB": [
                    Mark(result["ratios"][all_reduce.RESIDENT], SHARED),
                    Mark(result["ratios"][all_reduce.COPIED], SHARED, is_hollow=True),
                ]
                for result in report["sizes"]
            }
        },
        line=1,
    )


PICTURES: Mapping[str, Mapping[str, Callable[[Report], Picture]]] = {
    "versus_torch": {"ratio": ratios},
    "bucket_size": {"bucket_size": bucket_sizes},
    "hook_cost": {"hook_cost": hook_costs},
    "all_reduce": {"all_reduce": all_reduces},
}
TABLES: Mapping[str, Callable[[Report], Iterable[Table]]] = {
    "versus_torch": versus_torch.tables,
    "bucket_size": bucket_size.tables,
    "hook_cost": hook_cost.tables,
    "memory": memory.tables,
    "all_reduce": all_reduce.tables,
    "earned": earned.tables,
    "xray_cost": xray_cost.tables,
}


if __name__ == "__main__":
    main(tyro.cli(Config))
