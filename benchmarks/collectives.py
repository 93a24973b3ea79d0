"""How long do collectives take by the backend minddp, as a multiple of gloo's time, and beside memcpy?

    python -m benchmarks collectives                       # about two minutes
    python -m benchmarks collectives --world-size 4 --sizes-kib 64 1024 102400

Each collective and size is a race of its own: over gloo; over minddp, of any tensor; an all-reduce also of a tensor
that minddp has allocated, as buckets are; and of *memcpy*, in which each rank copies a tensor of that size once.
The size is that of the larger of a rank's input and output. The time is that of one call of `torch.distributed`
with nothing else to do. See [Note: paired rounds] for how the ratio is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.display import RATIO, Table, table_of
from benchmarks.harness import compare, median_ms, timed_race
from benchmarks.question import RaceOptions, Report, ask, path_of, read, report_of
from minddp.transport.backend import register

GLOO, MINDDP, ALLOCATED, MEMCPY = "gloo", "minddp", "minddp, allocated", "memcpy"
TURN_KIB = 50 * 1024  # a turn moves so many bytes, but at least 2 messages and at most 100

#: Each call with the whole tensor, a rank's part of it, and the group; it returns what the call has written.
Call = Callable[[Tensor, Tensor, dist.ProcessGroup], Tensor]


def all_reduce(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(whole, group=group)
    return whole


def reduce_scatter(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.reduce_scatter_tensor(part, whole, group=group)
    return part


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole


def broadcast(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.broadcast(whole, 0, group=group)
    return whole


CALLS: Mapping[str, Call] = {call.__name__: call for call in (all_reduce, reduce_scatter, all_gather, broadcast)}


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time collectives of the backend minddp beside gloo's and beside memcpy."""

    LEAST = RaceOptions.LEAST | {"world_size": 2}

    sizes_kib: tuple[float, ...] = (4, 64, 1024, 25 * 1024)
    rounds: int = 24
    warmup_rounds: int = 3
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes_kib or min(self.sizes_kib) <= 0:
            raise ValueError(f"sizes_kib is {self.sizes_kib}; give at least one size, all above 0.")


def main(config: Config) -> None:
    ask("collectives", time_all, config, tables)


def time_all(rank: int, config: Config) -> dict[str, Any]:
    """One race for each collective and size, on this rank; returns the report."""
    register()
    groups = {GLOO: dist.group.WORLD, MINDDP: dist.new_group(backend="minddp")}
    races = [time_one(name, rank, config, kib, groups) for name in CALLS for kib in config.sizes_kib]
    return report_of("time of collectives by the backend minddp as a multiple of gloo's", config, races=races)


def time_one(name: str, rank: int, config: Config, kib: float, groups: Mapping[str, Any]) -> dict[str, Any]:
    """Race the backends with one collective of one size, after a check that they agree."""
    call, ranks = CALLS[name], config.world_size
    numel = max(1, int(kib * 1024) // 4 // ranks) * ranks
    wholes = {backend: torch.empty(numel) for backend in groups}
    if name == "all_reduce":
        groups = {**groups, ALLOCATED: groups[MINDDP]}
        wholes[ALLOCATED] = groups[MINDDP].allocate(numel, torch.float32)
    parts = {backend: torch.empty(numel // ranks) for backend in groups}
    calls: dict[str, Callable[[], object]] = {
        backend: partial(call, wholes[backend], parts[backend], groups[backend]) for backend in groups
    }
    values = torch.randn(numel, generator=torch.Generator().manual_seed(config.seed + rank))
    for backend in groups:
        wholes[backend].copy_(values)
        parts[backend].copy_(values[: numel // ranks])
    results = [call(wholes[backend], parts[backend], groups[backend]).clone() for backend in groups]
    for tensor in (*wholes.values(), *parts.values()):
        tensor.zero_()  # repeated sums of zeros stay finite
    source, target = torch.zeros(numel), torch.zeros(numel)
    calls[MEMCPY] = partial(target.copy_, source)
    repeats = config.turn(min(100, max(2, int(TURN_KIB / kib))))
    wall = timed_race(calls, [list(calls)], config.race_rounds, repeats)
    return {
        "collective": name,
        "kib": kib,
        "same_bits": all(torch.equal(result, results[0]) for result in results),
        "median_ms": {backend: round(median_ms(wall[backend]), 5) for backend in wall},
        "ratios": {backend: compare(wall[backend], wall[GLOO], config.seed) for backend in wall},
        "of_memcpy": {backend: compare(wall[MEMCPY], wall[backend], config.seed) for backend in wall},
    }


def tables(report: Report) -> Iterator[Table]:
    """One for each collective: a line for each size, of any tensor and of an allocated one."""
    columns = {"gloo, ms": "{gloo:.3f}", "minddp, ms": "{ours:.3f}", "of gloo's": RATIO, "of memcpy": "{speed:.0%}"}
    for name in CALLS:
        races = [race for race in report["races"] if race["collective"] == name]
        figures = {
            size_of(race["kib"]) + backend.removeprefix(MINDDP): {
                "gloo": race["median_ms"][GLOO],
                "ours": race["median_ms"][backend],
                "ratio": race["ratios"][backend],
                "speed": race["of_memcpy"][backend]["median"],
            }
            for backend in (MINDDP, ALLOCATED)
            for race in races
            if backend in race["ratios"]
        }
        same = all(race["same_bits"] for race in races)
        caption = "All results are equal to the bit." if same else "The results DIFFER between the backends."
        yield table_of(name, f"float32, {report['config']['world_size']} ranks", columns, figures, caption)


def size_of(kib: float) -> str:
    return f"{kib / 1024:g} MiB" if kib >= 1024 else f"{kib:g} KiB"


def fill() -> None:
    """Print the tables for docs/backend.md, as far as they have been measured."""
    report = read(path_of("collectives"))
    if report is not None:
        print("\n\n".join(table.markdown() for table in tables(report)))
