"""How much memory does a wrapper take beyond the model, and how many bytes does it copy in a step?

    python -m benchmarks.memory     # about three minutes on two cores; other load does not change the figures

Every contestant in turn wraps a fresh copy of the model and takes a few steps, enough for the buckets to be
rebuilt. The peak covers all of that; the copies are those of one step after it. Both are counted, see
`accounting.py`.

[Note: two stretches]
A wrapper's own memory is followed from byte to byte, but memory that ranks share is seen only when they stand
still. So wrapping, when weights are broadcast, and stepping, when gradients are gathered, are counted apart: what
is shared at the end of a stretch counts all along in it, but not in the stretch before, or buckets in shared memory
would be added to a broadcast that is over when they are made. Shared memory is there once it is written to. What is
shared only in the middle of a stretch, while buckets are rebuilt, is missed.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import tyro
from rich.table import Table
from torch import nn

from benchmarks import contestants, machine, results
from benchmarks.accounting import Peak, WrittenBytes, nbytes, peak_memory, shared_bytes
from benchmarks.contestants import FLOOR, Contestant, OtherName, SettingName, TransportName
from benchmarks.display import console_of, progress_of, table_of
from benchmarks.launch import DeviceName, run_ranks
from benchmarks.workloads import Workload, WorkloadName, workload

STEPS = 4  # a static graph is rebuilt before its third
REPEATS = 2
MIB = 2**20


@dataclass(frozen=True)
class Config:
    """Count the memory that each wrapper takes at its peak, and the bytes that it copies in a step."""

    workloads: tuple[WorkloadName, ...] = (
        "many_small",
        "transformer",
        "wide_mlp",
        "convnet",
        "embedding",
        "embedding_sparse",
    )
    settings: tuple[SettingName, ...] = ("default", "views", "static", "batched", "views_static")
    transports: tuple[TransportName, ...] = ("process_group", "shared_memory")
    others: tuple[OtherName, ...] = ("replicate", "naive", "flat", "overlapped", "bucketed", "automatic", "zero1")
    world_size: int = 2
    device: DeviceName = "cpu"
    tiny: bool = False
    """Models of no size, to see that all runs."""
    out: Path | None = None
    """JSON file to write; by default benchmarks/results/memory.json."""
    timeout_s: float = 1800.0


def main(config: Config) -> None:
    console = console_of()
    unknown, absent = contestants.unknown_to_torch(config.settings), contestants.not_installed(config.others)
    if unknown or absent:
        console.print(f"Left out, as they are not to be had here: {', '.join([*unknown, *absent])}.")
    report, *_ = run_ranks(
        count_workloads,
        config,
        [setting for setting in config.settings if setting not in unknown],
        [name for name in config.others if name not in absent],
        world_size=config.world_size,
        threads=1,
        timeout_s=config.timeout_s,
        device=config.device,
    )
    for result in report["workloads"].values():
        console.print(table(result))
    results.write(report, config.out or results.path_of("memory"))


def count_workloads(rank: int, config: Config, settings: list[str], others: list[str]) -> dict[str, Any]:
    """All contestants on all workloads, on this rank; returns the report, ready for JSON."""
    pairs = contestants.pairs(settings, config.transports)
    field = [Contestant(FLOOR, "floors"), *pairs, *map(contestants.other, others)]
    counted = {}
    with progress_of(rank) as start_bar:
        for name in config.workloads:
            task = workload(name, tiny=config.tiny)
            entrants = contestants.for_workload(field, task)
            advance = start_bar(name, len(entrants))
            model = task.model().to(config.device)
            by_name = {}
            for contestant in entrants:
                by_name[contestant.name] = count(contestant, model, task, rank)
                advance()
            counted[name] = summarise(task, model, by_name)
    return {
        "question": "bytes that a wrapper holds and copies, beyond those of the step without it",
        "machine": machine.describe(config.device),
        "config": results.of_config(config),
        "workloads": counted,
    }


@dataclass(frozen=True)
class Count:
    """Bytes: allocated at the peak of the first steps, and written in a later one."""

    peak: int
    written: int


def count(contestant: Contestant, model: nn.Module, task: Workload, rank: int) -> Count:
    """Of one contestant, on the rank that has least. Collective.

    Memory whose last reference is dropped by a communication thread is never seen to be freed, so a peak can be
    too high, by chance, but not too low: the lowest of several is taken.
    """
    counts = [count_once(contestant, copy.deepcopy(model), task, rank) for _ in range(REPEATS)]
    counts_of_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts_of_rank, counts)
    everywhere = [counted for of_rank in counts_of_rank for counted in of_rank]
    return Count(min(c.peak for c in everywhere), min(c.written for c in everywhere))


def count_once(contestant: Contestant, model: nn.Module, task: Workload, rank: int) -> Count:
    """On this rank. The model is there before; its gradients and all else are not. Collective."""
    gc.collect()
    device, shared_before = next(model.parameters()).device, shared_among_ranks()
    with peak_memory(device) as wrapping:
        step = contestant.step(contestant.wrap(model), task, rank)
    shared_by_wrapping = shared_among_ranks() - shared_before
    with peak_memory(device) as stepping:
        for _ in range(STEPS):
            step()
    shared_by_all = shared_among_ranks() - shared_before
    with WrittenBytes() as written:
        step()
    return Count(peak_of(Stretch(wrapping, shared_by_wrapping), Stretch(stepping, shared_by_all)), written.nbytes)


@dataclass(frozen=True)
class Stretch:
    """Of a run: its own memory, beyond what there was at its beginning, and the bytes shared at its end in all."""

    own: Peak
    shared: int


def peak_of(*stretches: Stretch) -> int:
    """The highest of their peaks, each on top of what those before it have left. See [Note: two stretches]."""
    level, peaks = 0, []
    for stretch in stretches:
        peaks.append(level + stretch.own.nbytes + stretch.shared)
        level += stretch.own.left
    return max(peaks)


def shared_among_ranks() -> int:
    """While no rank maps or unmaps anything, or the parts would not add up. Collective."""
    dist.barrier()
    nbytes_here = shared_bytes()
    dist.barrier()
    return nbytes_here


def summarise(task: Workload, model: nn.Module, counts: Mapping[str, Count]) -> dict[str, Any]:
    """Beyond the bare step's, in MiB, and as multiples of all parameters' bytes."""
    bare, parameters = counts[FLOOR], sum(map(nbytes, model.parameters()))
    return {
        "title": task.title,
        "parameters_mib": parameters / MIB,
        "no_wrapper": {"peak_mib": bare.peak / MIB, "written_mib": bare.written / MIB},
        "contestants": {
            name: {
                "peak_mib": counted.peak / MIB,
                "added_mib": (counted.peak - bare.peak) / MIB,
                "added": (counted.peak - bare.peak) / parameters,
                "copied_mib": (counted.written - bare.written) / MIB,
                "copied": (counted.written - bare.written) / parameters,
            }
            for name, counted in counts.items()
            if name != FLOOR
        },
    }


def table(result: Mapping[str, Any]) -> Table:
    rows = table_of(
        f"{result['title']}: {result['parameters_mib']:.2f} MiB of parameters",
        "contestant",
        *("peak MiB", "added MiB", "added / model", "copied MiB", "copied / model"),
        caption=f"no wrapper: {result['no_wrapper']['peak_mib']:.2f} MiB at the peak, the parameters not counted",
    )
    for name, counted in result["contestants"].items():
        rows.add_row(
            name,
            f"{counted['peak_mib']:.2f}",
            f"{counted['added_mib']:.2f}",
            f"{counted['added']:.2f}",
            f"{counted['copied_mib']:.2f}",
            f"{counted['copied']:.2f}",
        )
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config))
