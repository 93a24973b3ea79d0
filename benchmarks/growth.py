"""How does the cost of a wrapper grow with tensors, with bytes, with ranks, and what memory does it take?

    python -m benchmarks growth     # some minutes

At each point torch and minddp race beside no wrapper; what they add to its step is the cost. Memory is
measured on Linux alone.

[Note: proportional set size]
Resident size counts a page that n ranks share in each of them, so shared memory would look n times as large. The
proportional set size counts `1 / n` of it in each. Memory that is free within the heap is given back before a look.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contestants import BASELINE, FLOOR, RanksOptions, candidate, on_ranks
from benchmarks.display import RATIO, Table, progress, table_of
from benchmarks.harness import compare, estimate, gathered, schedule
from benchmarks.question import RaceOptions, Report, ask, report_of
from benchmarks.race import race_workload
from benchmarks.workloads import Workload

Axis = Literal["tensors", "elements", "ranks", "memory"]
TURN_TENSORS, TURN_ELEMENTS = 20_000, 10_000_000  # a turn gets through about so many
PIECES, PIECE = 16, 2**16  # tensors, and the elements of one, along the other axes
WEIGHINGS = 6
ROLLUP = Path("/proc/self/smaps_rollup")  # of Linux alone


@dataclass(frozen=True, kw_only=True)
class Config(RanksOptions):
    """Time, and weigh, torch's wrapper and minddp's from small to large."""

    LEAST = RaceOptions.LEAST | {"world_size": 2}

    axes: tuple[Axis, ...] = ("tensors", "elements", "ranks", "memory")
    tensors: tuple[int, ...] = (100, 1_000, 4_000, 10_000, 16_000)
    """Numbers of tensors of 4 elements, on one rank: nothing is communicated."""
    elements: tuple[int, ...] = (100_000, 1_000_000, 10_000_000, 100_000_000)
    """Numbers of elements in 16 tensors, on two ranks."""
    ranks: tuple[int, ...] = (2, 4, 6, 8)
    """Numbers of ranks, of 1,048,576 elements."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min((*self.tensors, *self.elements)) < PIECES:
            raise ValueError(f"tensors and elements must be at least {PIECES} each.")


class Separate(nn.Module):
    """Parameters whose sum costs one concatenation forward and one split backward."""

    def __init__(self, count: int, elements: int):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(elements) for _ in range(count))

    def forward(self) -> Tensor:
        return torch.cat(list(self.weights)).sum()


def separate(count: int, elements: int) -> Workload:
    turn = min(TURN_TENSORS // count, TURN_ELEMENTS // (count * elements))
    return Workload(
        f"{count:,} x {elements:,}",
        f"{count:,} tensors of {elements:,}",
        lambda: Separate(count, elements),
        batch=lambda rng: (torch.empty(0), torch.empty(0)),
        loss=lambda output, target: output,
        learning_rate=0.0,
        steps_per_turn=max(2, min(turn, 50)),
        own_loss=lambda model: model(),
    )


def main(config: Config) -> None:
    ask("growth", along_axes, config, tables)


def along_axes(rank: int, config: Config) -> dict[str, Any]:
    """All points of all axes, on this rank; returns the report."""
    axes = {axis: along(rank, axis, config) for axis in config.axes if axis != "memory" or ROLLUP.exists()}
    return report_of("time and memory that a wrapper adds, from small to large", config, axes=axes)


def along(rank: int, axis: Axis, config: Config) -> dict[str, Any]:
    """The points of one axis, by number. Collective."""
    points: dict[str, Any] = {}
    if axis == "memory":
        return {f"{number}": weigh(rank, number, config) for number in config.elements}
    for number in getattr(config, axis):
        world, count, elements = {
            "tensors": (1, number, 4),
            "elements": (2, PIECES, number // PIECES),
            "ranks": (number, PIECES, PIECE),
        }[axis]
        points[str(number)] = time_point(rank, axis, world, separate(count, elements), config)
    return points


def time_point(rank: int, axis: str, world: int, task: Workload, config: Config) -> dict[str, Any]:
    """The milliseconds that each wrapper adds to a step, and its time as a multiple of torch's. Collective."""
    field = on_ranks(axis, world, config.transports, task, forward_backward)
    raced = race_workload(rank, task, field, config)
    bare, native = (raced.wall[f"{axis} {name}, {world}"] for name in (FLOOR, BASELINE))
    times = {name: raced.wall[f"{axis} {name}, {world}"] for name in names_of(config.transports)}
    return {
        name: {
            "bare": 1e3 * float(estimate(bare, 0).median),
            "added": estimate((wall - bare) * 1e3, config.seed),
            "ratio": compare(wall, native, config.seed),
        }
        for name, wall in times.items()
    }


def names_of(transports: Sequence[str]) -> list[str]:
    return [BASELINE, *(candidate("default", transport) for transport in transports)]


def forward_backward(model: nn.Module, task: Workload, rank: int) -> Callable[[], None]:
    """A step without an optimizer, whose own cost per parameter would be the larger part."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model().backward()

    return step


def weigh(rank: int, number: int, config: Config) -> dict[str, Any]:
    """MiB that each wrapper adds to a rank's memory, the mean of two ranks. See [Note: proportional set size].

    In alternating order, as often as there are rounds, but at most `WEIGHINGS` times; before that once for nothing.
    Collective.
    """
    task, names = separate(PIECES, number // PIECES), [FLOOR, *names_of(config.transports)]
    entered = on_ranks("memory", 2, config.transports, task, forward_backward)
    field = dict(zip(names, entered, strict=False))
    model, held = task.model(), {name: list[float]() for name in names}
    rounds = 1 + min(WEIGHINGS, config.race_rounds.timed)
    advance = progress(f"memory, {number:,}", rounds)
    for order in schedule([names], rounds, config.seed):
        for name in order:
            before = proportional_bytes()
            wrapped = field[name].wrap(copy.deepcopy(model))
            step = field[name].step(wrapped, task, rank)
            for _ in range(4):
                step()
            held[name].append(statistics.fmean(gathered(proportional_bytes() - before)[:2]) / 2**20)
            del step, wrapped
        advance()
    mib = {name: np.array(values[1:]) for name, values in held.items()}
    return {
        name: {
            "bare": float(np.median(mib[FLOOR])),
            "added": estimate(mib[name] - mib[FLOOR], config.seed),
            "ratio": compare(mib[name], mib[BASELINE], config.seed),
        }
        for name in names[1:]
    }


def proportional_bytes(rollup: Path = ROLLUP) -> int:
    """The memory of this process, with 1/W of pages that W processes share. Collective: ranks wait for it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory within the heap
    dist.barrier()
    fields = dict(line.split(":", 1) for line in rollup.read_text().splitlines()[1:])
    dist.barrier()
    return int(fields["Pss"].removesuffix("kB")) * 1024


# ------------------------------------------------------------------ tables


TITLES: Mapping[Axis, str] = {
    "tensors": "tensors of 4 elements, one rank, nothing communicated",
    "elements": "elements in 16 tensors, two ranks",
    "ranks": "ranks, 1,048,576 elements",
    "memory": "elements in 16 tensors, two ranks: proportional set size after four steps, MiB per rank",
}


def tables(report: Report) -> Iterator[Table]:
    columns = {"no wrapper": "{bare:.3f}", "added": "{added[median]:.3f} ({added[low]:.3f}–{added[high]:.3f})"}
    columns |= {"as a multiple of torch's": RATIO}
    for axis, points in report["axes"].items():
        each = {"µs per tensor": "{each:.2f}"} if axis == "tensors" else {}
        rows = {
            f"{int(number):,} {axis if axis != 'memory' else 'elements'}, {name}": of
            | {"each": of["added"]["median"] * 1e3 / int(number)}
            for number, point in points.items()
            for name, of in point.items()
        }
        unit = "MiB" if axis == "memory" else "ms per step"
        machine = report["machine"]
        caption = f"{unit}; {machine['cores']:g} cores: {machine['cpu']}, torch {machine['torch']}."
        yield table_of(f"By {TITLES[axis]}", "", columns | each, rows, caption)
