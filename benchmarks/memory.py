"""How much memory does a wrapper take beyond the model, and how many bytes does it copy in a step?

    python -m benchmarks.memory     # about three minutes on two cores; other load does not change the figures

Every contestant in turn wraps a fresh copy of the model and takes a few steps, enough for the buckets to be
rebuilt. The peak covers all of that; the copies are those of one step after it. Both are counted, see
`accounting.py`.

[Note: two stretches]
Each allocation of a wrapper's own memory is seen, but memory that ranks share is counted only while they stand
still. So wrapping, when weights are broadcast, and stepping, when gradients are gathered, are counted apart: bytes
that are shared at the end of a stretch count in all of it, but not in the stretch before, or buckets in shared
memory would be added to a broadcast that is over when they are made. Shared memory exists once it is written to.
Memory that is shared only in the middle of a stretch, while buckets are rebuilt, is missed.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import nn

from benchmarks import contestants
from benchmarks.accounting import Peak, WrittenBytes, nbytes, peak_memory, shared_bytes
from benchmarks.contestants import FLOOR, Contestant, FieldOptions, TransportName
from benchmarks.display import Table, progress_of, table_of
from benchmarks.harness import gathered
from benchmarks.question import Report, ask, report_of
from benchmarks.workloads import Workload, workload

STEPS = 4  # a static graph is rebuilt before its third
REPEATS = 2
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Config(FieldOptions):
    """Count the memory that each wrapper takes at its peak, and the bytes that it copies in a step."""

    transports: tuple[TransportName, ...] = ("process_group", "shared_memory")


def main(config: Config) -> None:
    settings = contestants.supported(config.settings)
    ask("memory", count_workloads, dataclasses.replace(config, settings=settings), tables, device=config.device)


def count_workloads(rank: int, config: Config) -> dict[str, Any]:
    """All contestants on all workloads, on this rank; returns the report."""
    torch.manual_seed(config.seed)
    pairs = contestants.pairs(config.settings, config.transports)
    field = [Contestant(FLOOR, "floors"), *pairs, *map(contestants.other, config.others)]
    counted = {}
    with progress_of(rank) as start_bar:
        for name in config.workloads:
            task = workload(name, config.workload_size)
            entrants = contestants.for_workload(field, task)
            advance = start_bar(name, len(entrants))
            model = task.model().to(config.device)
            by_name = {}
            for contestant in entrants:
                by_name[contestant.name] = count(contestant, model, task, rank)
                advance()
            counted[name] = summarise(task, model, by_name)
    question = "bytes that a wrapper holds and copies, beyond those of the step without it"
    return report_of(question, config, config.device, workloads=counted)


@dataclass(frozen=True)
class Count:
    """Bytes: allocated at the peak of the first steps, and written in a later one."""

    peak: int
    written: int


def count(contestant: Contestant, model: nn.Module, task: Workload, rank: int) -> Count:
    """The count of one contestant on the rank that has least. Collective.

    Memory whose last reference is dropped by a communication thread is never seen to be freed, so a peak can be
    too high, by chance, but not too low: the lowest of several is taken.
    """
    counts = [count_once(contestant, copy.deepcopy(model), task, rank) for _ in range(REPEATS)]
    everywhere = [counted for of_rank in gathered(counts) for counted in of_rank]
    return Count(min(c.peak for c in everywhere), min(c.written for c in everywhere))


def count_once(contestant: Contestant, model: nn.Module, task: Workload, rank: int) -> Count:
    """The count on this rank. The model exists before; its gradients and all else do not. Collective."""
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
    """A part of a run: its own memory beyond that at its beginning, and all bytes that are shared at its end."""

    own: Peak
    shared: int


def peak_of(*stretches: Stretch) -> int:
    """The highest of their peaks, each on top of what those before it left. See [Note: two stretches]."""
    level, peaks = 0, []
    for stretch in stretches:
        peaks.append(level + stretch.own.nbytes + stretch.shared)
        level += stretch.own.left
    return max(peaks)


def shared_among_ranks() -> int:
    """The bytes that ranks share, counted while no rank maps memory, or the parts would not add up. Collective."""
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


def tables(report: Report) -> Iterator[Table]:
    figures = {"peak MiB": "peak_mib", "added MiB": "added_mib", "added / model": "added"}
    figures |= {"copied MiB": "copied_mib", "copied / model": "copied"}
    columns = {heading: f"{{{name}:.2f}}" for heading, name in figures.items()}
    for result in report["workloads"].values():
        title = f"{result['title']}: {result['parameters_mib']:.2f} MiB of parameters"
        caption = f"{FLOOR}: {result['no_wrapper']['peak_mib']:.2f} MiB at the peak, the parameters not counted"
        yield table_of(title, "contestant", columns, result["contestants"], caption)


if __name__ == "__main__":
    main(tyro.cli(Config))
