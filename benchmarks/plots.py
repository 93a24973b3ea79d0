"""Draw what has been measured: PNGs for each question that has been answered, and the tables as Markdown.

    python -m benchmarks.plots    # or `make plots`; needs matplotlib, which the `bench` extra has

Points are medians, bars their 95% bootstrap intervals. Everything is read from the JSON files; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks import results, tables
from benchmarks.all_reduce import COPIED, RESIDENT
from benchmarks.contestants import ALONE, BASELINE, FLOOR, candidate
from benchmarks.sheet import (
    FAINT,
    MINDDP,
    OTHERS,
    SHARED,
    SHARED_PALE,
    TEXT,
    TORCH,
    across,
    beside,
    colour_of,
    everybody,
    footnote,
    key,
    on_one_scale,
    rows_of,
    sheet,
    titled,
    unit,
    upright,
    words_of,
)

Report = Mapping[str, Any]

BY_PROCESS_GROUP, BY_SHARED_MEMORY = "minddp by the process group", "minddp by shared memory, as it comes"
DPI = 160
FAR = 4  # times of what torch adds: drawn to scale, such a row would leave no room to tell the others apart


@dataclass(frozen=True)
class Config:
    """Draw the figures and write the tables, beside the JSON files that they are made from."""

    directory: Path = results.DIRECTORY


def main(config: Config) -> None:
    console = Console()
    for question, figures in FIGURES_OF_QUESTION.items():
        report = results.read(results.path_of(question, config.directory))
        if report is None:
            console.print(f"{question}: not measured yet")
            continue
        for name, draw in figures.items():
            path = config.directory / f"{name}.png"
            draw(report).savefig(path, dpi=DPI, facecolor="white")
            console.print(f"{question}: {path.name}")
    console.print(f"tables: {tables.write(config.directory).name}")


def ratios(report: Report) -> Figure:
    """Beside torch at equal settings: one panel for each workload, a row for each setting."""
    settings, workloads = report["config"]["settings"], report["workloads"].values()
    title = "Time of a training step relative to torch's DDP at the same setting: less is faster"
    figure, panels = sheet(title, len(workloads), panel_inches=0.33 * len(settings))
    for axes, result in zip(panels, workloads, strict=True):
        titled(axes, result["title"])
        axes.axvline(1, color=TORCH, linewidth=1)
        for row, setting in enumerate(settings):
            transports = {candidate(setting, transport): transport for transport in report["config"]["transports"]}
            present = [name for name in transports if name in result["contestants"]]
            for place, name in enumerate(present):
                below = row + 0.22 * (place - (len(present) - 1) / 2)
                hollow = transports[name] == "auto"
                colour = MINDDP if transports[name] == "process_group" else SHARED
                across(axes, result["contestants"][name]["ratio"], below, colour, hollow=hollow)
    rows_of(panels, [words_of(setting) for setting in settings])
    on_one_scale(panels)
    unit(panels, "multiple of torch's time")
    key(
        figure,
        {
            f"● {BY_PROCESS_GROUP}": MINDDP,
            "● minddp by shared memory": SHARED,
            "○ as it comes (raced at default only)": SHARED,
            "line at 1: torch": TORCH,
        },
    )
    footnote(figure, report)
    return figure


def step_times(report: Report) -> Figure:
    """What each wrapper adds to the bare step, and how low it could be. Rows without a mark: not raced there."""
    workloads = report["workloads"].values()
    names = everybody(workloads)
    title = "Time of a training step, and what of it averaging the gradients adds"
    figure, panels = sheet(title, len(workloads), panel_inches=0.17 * len(names))
    for axes, result in zip(panels, workloads, strict=True):
        titled(axes, result["title"])
        step_times_of(axes, result, names)
    rows_of(panels, names)
    unit(panels, "milliseconds")
    bounds = {
        f"shaded: {FLOOR}": TORCH,
        f"dotted: {ALONE}": TEXT,
        "| lower bound: the longer of computing and sending alone": TEXT,
        "→ far beyond the edge": TEXT,
    }
    key(figure, bounds)
    footnote(figure, report)
    return figure


def step_times_of(axes: Axes, result: Report, names: Sequence[str]) -> None:
    """One workload: a row for each name that trains it."""
    floors, present = result["floors"], [name for name in names if name in result["contestants"]]
    bare = floors["no_wrapper_ms"]
    added = {name: result["contestants"][name]["exposed_ms"] for name in present}
    edge = 1.18 * (bare + max(e["high"] for e in added.values() if e["median"] < FAR * added[BASELINE]["median"]))
    axes.axvspan(0, bare, color=FAINT, linewidth=0)
    axes.axvline(floors["one_rank_alone_ms"], color=TEXT, linewidth=0.8, linestyle=":")
    for name in present:
        row, colour = names.index(name), colour_of(name)
        low, milliseconds, high = (bare + added[name][part] for part in ("low", "median", "high"))
        figure = f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"
        axes.plot([bare, min(milliseconds, edge)], [row, row], color=colour, linewidth=1.2)
        floor = floors["floor_ms"].get("shared_memory" if "shared" in name else "process_group", bare)
        axes.plot(floor, row, "|", color=TEXT, markersize=6, markeredgewidth=1)
        if milliseconds > edge:
            above = (edge, row - 0.12)
            axes.annotate(f"{figure} →", above, ha="right", va="bottom", color=TEXT, fontsize=6.5)
            continue
        axes.plot([low, high], [row, row], color=colour, linewidth=4, alpha=0.3, solid_capstyle="butt")
        axes.plot(milliseconds, row, "o", color=colour, markersize=3.5)
        beside(axes, figure, max(high, floor, bare), row, TEXT, size=6.5)
    axes.set_xlim(0, edge)


def bucket_sizes(report: Report) -> Figure:
    """A line for each family over the capacities that were set, points for those that were not."""
    workloads = report["workloads"].values()
    title = "Time of a training step relative to the step without a wrapper, by capacity of the buckets"
    figure, panels = sheet(title, len(workloads), panel_inches=2.4, wide=2)
    colours = {"torch": TORCH, "minddp": MINDDP, "minddp, shared memory": SHARED}
    for axes, result in zip(panels, workloads, strict=True):
        titled(axes, result["title"])
        caps = [heat for heat in result["families"]["minddp"] if heat not in ("default", "auto")]
        place = {heat: number for number, heat in enumerate([*caps, "default", "auto"])}
        for shift, (family, colour) in enumerate(colours.items()):
            figured = {heat: f["over_no_wrapper"] for heat, f in result["families"][family].items()}
            for heat, estimate in figured.items():
                upright(axes, estimate, place[heat] + 0.08 * (shift - 1), colour)
            axes.plot(
                [place[heat] + 0.08 * (shift - 1) for heat in caps],
                [figured[heat]["median"] for heat in caps],
                color=colour,
                linewidth=1.2,
            )
        axes.axvline(len(caps) - 0.5, color=FAINT)
        axes.set_xticks(
            list(place.values()), [heat if heat in ("default", "auto") else f"{heat} MiB" for heat in place]
        )
    unit(panels, "bucket_cap_mb; all else at its default")
    panels[0].set_ylabel("multiple of the time without a wrapper")
    key(figure, {"torch": TORCH, BY_PROCESS_GROUP: MINDDP, BY_SHARED_MEMORY: SHARED})
    footnote(figure, report)
    return figure


def hook_costs(report: Report) -> Figure:
    """Microseconds by number of parameters."""
    title = "What a wrapper adds to a step per parameter, nothing communicated"
    figure, [axes] = sheet(title, 1, panel_inches=2.4)
    counts = [int(count) for count in report["counts"]]
    names = list(report["counts"][str(counts[0])]["contestants"])
    for place, name in enumerate(names):
        added = [result["contestants"][name]["added_us"] for result in report["counts"].values()]
        at = [count * 1.04 ** (place - len(names) / 2) for count in counts]
        style = "-" if name.endswith("default") else "--"
        axes.plot(at, [estimate["median"] for estimate in added], style, color=colour_of(name), linewidth=1.2)
        for x, estimate in zip(at, added, strict=True):
            upright(axes, estimate, x, colour_of(name))
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_xlabel("parameters of the model")
    axes.set_ylabel("µs per parameter and step")
    axes.set_ylim(0)
    styles = {name: "" if name.endswith("default") else " (dashed)" for name in names}
    key(figure, {f"{name}{style}": colour_of(name) for name, style in styles.items()})
    footnote(figure, report)
    return figure


def memory(report: Report) -> Figure:
    """Peak and copies, as multiples of the model: one panel for each workload."""
    workloads = [result for name, result in report["workloads"].items() if not name.endswith("sparse")]
    names = everybody(workloads)
    title = "Memory and copies beyond those of the step without a wrapper, in multiples of the model's size"
    figure, panels = sheet(title, len(workloads), panel_inches=0.17 * len(names))
    for axes, result in zip(panels, workloads, strict=True):
        titled(axes, result["title"])
        axes.set_xlabel(f"multiples of the model's {result['parameters_mib']:.3g} MiB")
        for row, name in enumerate(names):
            if (figures := result["contestants"].get(name)) is None:
                continue
            mark: Any = {"color": colour_of(name), "markersize": 5.5}
            axes.plot(figures["copied"], row, "D", markerfacecolor="none", **mark)
            axes.plot(figures["added"], row, "o", **mark | {"markersize": 3.5})
    rows_of(panels, names)
    on_one_scale(panels)
    key(
        figure,
        {
            "● memory at the peak": TEXT,
            "◇ bytes copied in a step": TEXT,
            "torch": TORCH,
            BY_PROCESS_GROUP: MINDDP,
            BY_SHARED_MEMORY: SHARED,
            "others": OTHERS,
        },
    )
    footnote(figure, report, "counted, not timed; sparse gradients left out")
    return figure


def all_reduces(report: Report) -> Figure:
    """Shared memory beside gloo, by the size of the message."""
    title = "Time of an all-reduce in shared memory relative to gloo's"
    figure, [axes] = sheet(title, 1, panel_inches=2.4)
    sizes = [result["kib"] for result in report["sizes"]]
    for name, colour, shift in ((RESIDENT, SHARED, 1 / 1.05), (COPIED, SHARED_PALE, 1.05)):
        estimates = [result["ratios"][name] for result in report["sizes"]]
        at = [kib * shift for kib in sizes]
        axes.plot(at, [estimate["median"] for estimate in estimates], color=colour, linewidth=1.2)
        for x, estimate in zip(at, estimates, strict=True):
            upright(axes, estimate, x, colour)
    axes.axhline(1, color=TORCH, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(sizes, [f"{kib:g} KiB" if kib < 1024 else f"{kib / 1024:g} MiB" for kib in sizes])
    axes.set_xlabel(f"size of the tensor, {report['config']['dtype']}")
    axes.set_ylabel("multiple of gloo's time")
    axes.set_ylim(0)
    key(
        figure,
        {
            "tensor lies in shared memory, as buckets do": SHARED,
            "it is copied in and out": SHARED_PALE,
            "line at 1: gloo": TORCH,
        },
    )
    footnote(figure, report)
    return figure


FIGURES_OF_QUESTION: Mapping[str, Mapping[str, Callable[[Report], Figure]]] = {
    "versus_torch": {"ratio": ratios, "step_time": step_times},
    "bucket_size": {"bucket_size": bucket_sizes},
    "hook_cost": {"hook_cost": hook_costs},
    "memory": {"memory": memory},
    "all_reduce": {"all_reduce": all_reduces},
}


if __name__ == "__main__":
    main(tyro.cli(Config))
