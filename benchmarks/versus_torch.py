"""How long does a training step take beside torch's DistributedDataParallel, and beside its lower bounds?

    python -m benchmarks versus_torch                # the measurement, about ten minutes on two cores
    python -m benchmarks versus_torch --size quick   # a look
    python -m benchmarks versus_torch --control      # torch's class in both places: the harness's own error

Each workload is trained by torch and by minddp at every setting, by other wrappers, and without one, all in one
process group. See [Note: paired rounds] for how the ratio is taken, and NOTES.md for how to read the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import tyro

from benchmarks import contestants
from benchmarks.contestants import (
    AS_IT_COMES,
    BASELINE,
    FLOOR,
    WAITING,
    Contestant,
    FieldOptions,
    SettingName,
    TransportName,
    candidate,
    wire,
)
from benchmarks.display import RATIO, Table, table_of
from benchmarks.harness import Rounds, Times, compare, estimate, in_ms, median_ms
from benchmarks.question import RaceOptions, Report, ask, report_of
from benchmarks.race import Raced, race_workload
from benchmarks.workloads import Workload


@dataclass(frozen=True, kw_only=True)
class Config(FieldOptions, RaceOptions):
    """Time a training step of minddp beside torch's DistributedDataParallel."""

    LEAST = RaceOptions.LEAST | {"rounds": 2}

    transports: Annotated[tuple[TransportName, ...], tyro.conf.arg(aliases=["--transport"])] = (
        "process_group",
        "shared_memory",
        "auto",
    )
    """minddp's transport; on a GPU, and for torch in its place, always the process group."""
    rounds: int = 26
    """Timed rounds, at least; an even number is fair to both of a pair."""
    seconds: float = 60.0
    """A workload of short steps has so many times these rounds that they take about this long, too."""
    control: bool = False
    """Put torch's class in minddp's place: every ratio should be 1."""
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.workloads or not self.settings:
            raise ValueError("There is nothing to time; name at least one workload and one setting.")

    @property
    def race_rounds(self) -> Rounds:
        return dataclasses.replace(super().race_rounds, seconds=self.seconds if self.size == "full" else 0.0)

    def resolved(self) -> Config:
        """This configuration without anything that cannot run; a quick look has fewer settings and no others."""
        transports = ("process_group",) if self.device == "cuda" or self.control else self.transports
        config = dataclasses.replace(self, transports=transports, settings=contestants.supported(self.settings))
        config = dataclasses.replace(config, others=contestants.available(self.others))
        if self.size != "quick" or len(self.settings) == 1:
            return config
        quick: tuple[SettingName, ...] = tuple(of for of in self.settings if of in ("default", "views_static"))
        quick = quick or self.settings[:1]
        left = [setting for setting in self.settings if setting not in quick]
        print(f"A quick look: without the settings {', '.join(left)}.")
        return dataclasses.replace(config, settings=quick)


def main(config: Config) -> None:
    name = "versus_torch_control" if config.control else "versus_torch"
    ask(name, time_workloads, config.resolved(), tables, device=config.device)


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """All workloads, one after another, on this rank; returns the report."""
    timed = {task.name: time_workload(rank, task, config) for task in config.tasks()}
    question = "time of a training step beside torch's DistributedDataParallel at equal settings"
    return report_of(question, config, config.device, workloads=timed)


def time_workload(rank: int, task: Workload, config: Config) -> dict[str, Any]:
    """Race all contestants on one workload and summarise their turns."""
    pairs = contestants.pairs(config.settings, config.transports, control=config.control)
    split = () if config.control or "default" not in config.settings else config.transports
    field = [*contestants.floors(config.transports), *pairs, *map(contestants.other, config.others)]
    field += contestants.parts(split) if split else []
    field = contestants.for_workload(field, task)
    raced = race_workload(rank, task, field, config, device=config.device)
    return raced.described() | {
        "floors": floors(raced.wall),
        "split": {
            name: split_of(name, raced) for name in (BASELINE, *(candidate("default", t) for t in split)) if split
        },
        "contestants": {c.name: figures(c, raced) for c in field if c.baseline},
        "rounds_ms": in_ms(raced.wall),
        "rounds_cpu_ms": in_ms(raced.cpu),
    }


# ------------------------------------------------------------------ arithmetic on the rounds


def floors(wall: Times) -> dict[str, Any]:
    """Milliseconds per step that no wrapper can beat, and their parts."""
    return {
        "no_wrapper_ms": median_ms(wall[FLOOR]),
        "all_reduce_ms": {t: median_ms(wall[wire(t)]) for t in measured_wires(wall)},
        "floor_ms": {t: median_ms(floor_of(wall, t)) for t in measured_wires(wall)},
    }


def measured_wires(wall: Times) -> list[str]:
    return [t for t in ("process_group", "shared_memory") if wire(t) in wall]


def floor_of(wall: Times, transport: str) -> np.ndarray:
    """max(compute, bytes / bandwidth), round by round: everything hidden that can be hidden.

    "auto" may have chosen any transport, so its floor is the lower one.
    """
    wires = [wall[wire(t)] for t in measured_wires(wall) if transport in (t, "auto")]
    return np.maximum(wall[FLOOR], np.min(wires, axis=0)) if wires else wall[FLOOR]


def split_of(name: str, raced: Raced) -> dict[str, Any]:
    """Where the time beyond no wrapper goes, in ms; the parts add up in each round, so nearly in their medians.

    Each is the difference of two steps, one of them without that part. Communication hidden behind backward
    costs nothing here.
    """
    times = {part: raced.wall[f"{name}, {part}"] for part in ("no buffers", "nothing sent", "hooks")}
    waiting, bare, whole = raced.wall[WAITING] - raced.wall[FLOOR], raced.wall[FLOOR], raced.wall[name]
    seconds = {
        "overhead": whole - bare,
        "waiting": waiting,
        "hooks": times["hooks"] - bare,
        "copies": times["nothing sent"] - times["hooks"],
        "wire": times["no buffers"] - times["nothing sent"] - waiting,
        "buffers": whole - times["no buffers"],
    }
    of_torch = (whole - bare) / (raced.wall[BASELINE] - bare)
    return {part: estimate(of * 1e3, raced.seed) for part, of in seconds.items()} | {
        "of_torch": estimate(of_torch, raced.seed)
    }


def figures(contestant: Contestant, raced: Raced) -> dict[str, Any]:
    """The figures of one contestant. Collective."""
    name, baseline, wall = contestant.name, contestant.baseline, raced.wall
    assert baseline is not None, "floors have no baseline"
    return {
        "baseline": baseline,
        "median_ms": raced.median_ms(name),
        "median_cpu_ms": median_ms(raced.cpu[name]),
        "ratio": raced.ratio(name, baseline),
        "cpu_ratio": raced.cpu_ratio(name, baseline),
        "exposed_ms": raced.added_ms(name),
        "over_floor": compare(wall[name], floor_of(wall, contestant.transport), raced.seed),
        "same_bits": raced.same_bits(contestant),
    }


# ------------------------------------------------------------------ tables


COLUMNS = {
    "ms": "{median_ms:.2f}",
    "ratio": RATIO,
    "spread": "{ratio[spread]:.3f}",
    "cpu": "{cpu_ratio[median]:.3f}",
    "exposed ms": "{exposed_ms[median]:.2f}",
    "over floor": "{over_floor[median]:.2f}",
}


SPLIT = {
    "overhead ms": "{overhead[median]:.2f} ({overhead[low]:.2f}–{overhead[high]:.2f})",
    "of torch's": "{of_torch[median]:.2f} ({of_torch[low]:.2f}–{of_torch[high]:.2f})",
    "waiting": "{waiting[median]:.2f}",
    "hooks": "{hooks[median]:.2f}",
    "packing, copy back": "{copies[median]:.2f}",
    "wire exposed": "{wire[median]:.2f}",
    "buffers": "{buffers[median]:.2f}",
}
SPLIT_CAPTION = (
    "waiting: no wrapper with a barrier in each step; hooks: with views and nothing sent; packing and copy back: "
    "without views as well; wire exposed: what sending adds beyond waiting; buffers: what their broadcast adds."
)


def tables(report: Report) -> Iterator[Table]:
    """Both with default options, then a table for each workload."""
    workloads = report["workloads"].values()
    both = {
        result["title"]: ours | {"torch_ms": theirs["median_ms"]}
        for result in workloads
        if (ours := result["contestants"].get(AS_IT_COMES)) and (theirs := result["contestants"].get(BASELINE))
    }
    title = "As they come: `minddp.DistributedDataParallel(model)` against torch's"
    columns = {"torch ms": "{torch_ms:.2f}", "minddp ms": "{median_ms:.2f}", "ratio": RATIO}
    yield table_of(title, "workload", columns, both)
    for result in workloads:
        size = f"{result['tensors']} tensors, {result['gradient_mib']} MiB; {result['rounds']} rounds"
        floors_ms = result["floors"]["all_reduce_ms"].items()
        wires = ", ".join(f"by {transport.replace('_', ' ')} {ms:.2f}" for transport, ms in floors_ms)
        bare = result["floors"]["no_wrapper_ms"]
        differ = [name for name, of in result["contestants"].items() if not of["same_bits"]]
        weights = f"weights DIFFER from torch's: {', '.join(differ)}" if differ else "all weights equal to the bit"
        caption = f"ms per step: {FLOOR} {bare:.2f}, all-reduce only {wires}; {weights}."
        yield table_of(f"{result['title']}: {size}", "contestant", COLUMNS, result["contestants"], caption)
        if result.get("split"):
            title = f"{result['title']}: where the ms beyond no wrapper go"
            yield table_of(title, "contestant", SPLIT, result["split"], SPLIT_CAPTION)
