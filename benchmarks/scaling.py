"""How fast are 1, 2, 4, ... ranks together, beside torch's DDP?

    python -m benchmarks scaling                                     # the transformer of `versus_torch`
    python -m benchmarks scaling --model file.py:make --ranks 1 2 4

Weak: each rank has a batch of the same size. Strong: one batch is split among the ranks. All numbers of ranks race
in one run, in which ranks that are not needed wait in a barrier, so they can be compared round by round. The speed
of one rank without a wrapper, which has the machine to itself, is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.contestants import BASELINE, FLOOR, RanksOptions, candidate, on_ranks
from benchmarks.display import Table, table_of
from benchmarks.harness import compare, estimate
from benchmarks.own_model import has_parts, imported, own_workload
from benchmarks.question import Report, ask, report_of
from benchmarks.race import race_workload
from benchmarks.workloads import Workload, WorkloadName, workload


@dataclass(frozen=True, kw_only=True)
class Config(RanksOptions):
    """Time a training step on several numbers of ranks."""

    model: str | None = None
    """A model of your own: file.py:make or package.module:make. For strong scaling, make(parts) returns a loss on a
    batch of 1 / parts of the size."""
    workload: WorkloadName = "transformer"
    """The model, if none of your own is given."""
    ranks: tuple[int, ...] = (1, 2, 4)


def main(config: Config) -> None:
    ask("scaling", time_ranks, config, tables)


def time_ranks(rank: int, config: Config) -> dict[str, Any]:
    """One race of all numbers of ranks, on this rank; returns the report."""
    numbers = sorted({1, *config.ranks})
    whole = task_of(config, 1)
    tasks = {("weak", number): whole for number in numbers}
    splits = config.model is None or has_parts(imported(config.model))
    tasks |= {("strong", number): task_of(config, number) for number in numbers[1:] if splits}
    field = [c for (kind, number), task in tasks.items() for c in on_ranks(kind, number, config.transports, task)]
    raced = race_workload(rank, whole, field, config)
    alone = raced.wall[f"weak {FLOOR}, 1"]
    figures: dict[str, Any] = {}
    names = [FLOOR, BASELINE, *(candidate("default", transport) for transport in config.transports)]
    for kind, number in tasks:
        work = number if kind == "weak" else 1
        walls = {name: raced.wall[f"{kind} {name}, {number}"] for name in names}
        for name, wall in walls.items():
            figures.setdefault(kind, {}).setdefault(name, {})[str(number)] = {
                "ms": estimate(wall * 1e3, config.seed),
                "speedup": compare(work * alone, wall, config.seed),
                "ratio": compare(wall, walls[BASELINE], config.seed),
            }
    missing = [] if splits else [f"Not strong: make() of {config.model} has no parameter `parts`."]
    question = "steps of several numbers of ranks, beside one rank without a wrapper"
    return report_of(question, config, **raced.described(), kinds=figures, missing=missing)


def task_of(config: Config, parts: int) -> Workload:
    if config.model is not None:
        return own_workload(config.model, parts)
    return workload(config.workload, config.workload_size).share(parts)


def tables(report: Report) -> Iterator[Table]:
    spans = {"ms": ("ms", ".2f"), "speed-up": ("speedup", ".2f"), "of torch's time": ("ratio", ".3f")}
    columns = {
        heading: f"{{{name}[median]:{form}}} ({{{name}[low]:{form}}}–{{{name}[high]:{form}}})"
        for heading, (name, form) in spans.items()
    }
    machine = report["machine"]
    for kind, by_name in report["kinds"].items():
        rows = {
            f"{number} rank{'s' * (number != '1')}, {name}": of[number]
            for number in by_name[FLOOR]
            for name, of in by_name.items()
            if number in of
        }
        counted = f"{report['rounds']} rounds on {machine['cores']:g} cores: {machine['cpu']}."
        caption = " ".join([counted, *report["missing"]])
        yield table_of(f"{report['title']}, {kind} scaling", "", columns, rows, caption)
