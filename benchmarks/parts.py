"""How much does a step gain or lose by each part of minddp: optimisations, the guard, `check_finite`, x-ray?

    python -m benchmarks parts                # some minutes on two cores
    python -m benchmarks parts --size quick   # a look

Each workload is trained by wrappers that differ in one change of `CHANGES`, turn by turn, over the process group
and in shared memory. The ratio is the time of a step with a change as a multiple of the time as it comes; that of
`AGAIN`, which changes nothing, is the noise. An optimisation earns its place on a workload if a step without it
takes at least 3% longer and the interval excludes 1.

[Note: a change covers the first steps]
An optimisation is chosen where buckets are made: in the constructor, and again in a forward when they are rebuilt
in the order of the first backward. So a change is a function `change(build)` that holds its optimisation off while
`build()` constructs a wrapper and takes its first steps. All wrappers take the same first steps, so the weights of
all stay equal, and the race checks that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

from torch import nn

from benchmarks.contestants import Contestant
from benchmarks.display import RATIO, Table, table_of
from benchmarks.question import RaceOptions, Report, ask, report_of
from benchmarks.race import race_workload
from benchmarks.workloads import Workload, WorkloadName, training_step, workload
from minddp import DistributedDataParallel
from minddp.core import gradient_aliasing, packing
from minddp.tools.xray.record import Recorder
from minddp.tools.xray.sources import MinddpSource
from minddp.transport import spin_wait

Build = Callable[..., DistributedDataParallel]  #: takes options of the constructor
Change = Callable[[Build], DistributedDataParallel]

AS_IT_COMES, AGAIN = "as it comes", "as it comes, again"
FIRST_STEPS = 4  # buckets are rebuilt before the second step
recordings = ExitStack()


def nothing(build: Build) -> DistributedDataParallel:
    return build()


def without_acceleration(build: Build) -> DistributedDataParallel:
    """The switch that users have, of gradient aliasing and spin wait; the constructor reads it."""
    with mock.patch.dict(os.environ, MINDDP_ACCELERATION="off"):
        return build()


def without_gradient_aliasing(build: Build) -> DistributedDataParallel:
    """Averages are copied back into every gradient."""
    with mock.patch.object(gradient_aliasing, "SMALLEST_BYTES", sys.maxsize):
        return build()


def without_spin_wait(build: Build) -> DistributedDataParallel:
    """A waiting rank sleeps at once."""
    with mock.patch.object(spin_wait, "SPIN_LIMIT_S", 0.0):
        return build()


def without_packing_groups(build: Build) -> DistributedDataParallel:
    """Each gradient is packed by itself as soon as it arrives."""
    with mock.patch.object(packing, "LARGE_BYTES", 0):
        return build()


def recorded(build: Build) -> DistributedDataParallel:
    """By x-ray, until `recordings` is closed."""
    ddp = build()
    recordings.callback(Recorder(MinddpSource(ddp)).stop)
    return ddp


OPTIMISATIONS: Mapping[str, Change] = {
    "without acceleration": without_acceleration,
    "without gradient aliasing": without_gradient_aliasing,
    "without spin wait": without_spin_wait,
    "without packing groups": without_packing_groups,
}
CHANGES: Mapping[str, Change] = {
    AS_IT_COMES: nothing,
    AGAIN: nothing,
    **OPTIMISATIONS,
    "without the guard": lambda build: build(on_drift=None),
    "with check_finite": lambda build: build(check_finite=True),
    "recorded by x-ray": recorded,
}


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time a training step with and without each of minddp's parts."""

    workloads: tuple[WorkloadName, ...] = ("many_small", "transformer", "wide_mlp", "convnet", "short")
    transports: tuple[Literal["process_group", "shared_memory"], ...] = ("process_group", "shared_memory")
    rounds: int = 54
    timeout_s: float = 7200.0


def main(config: Config) -> None:
    ask("parts", time_workloads, config, tables)


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    timed = {name: time_workload(rank, name, config) for name in config.workloads}
    return report_of("a step with a change as a multiple of one as it comes", config, workloads=timed)


def time_workload(rank: int, name: WorkloadName, config: Config) -> dict[str, Any]:
    task = workload(name, config.workload_size)
    field = field_of(config.transports, task, rank)
    with recordings:
        raced = race_workload(rank, task, field, config)
    return raced.described() | {
        "transports": {
            transport: {c.name.rpartition(", ")[0]: raced.figures(c) for c in field if c.heat == transport}
            for transport in config.transports
        },
    }


def field_of(transports: Sequence[str], task: Workload, rank: int) -> list[Contestant]:
    """A heat for each transport: a wrapper for each change."""
    return [
        Contestant(
            f"{name}, {transport}",
            transport,
            f"{AS_IT_COMES}, {transport}",
            partial(wrapped_and_trained, change, transport, task, rank),
        )
        for transport in transports
        for name, change in CHANGES.items()
    ]


def wrapped_and_trained(change: Change, transport: str, task: Workload, rank: int, model: nn.Module) -> nn.Module:
    """See [Note: a change covers the first steps]. Collective."""

    def build(**options: Any) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, transport=transport, **options)
        step = training_step(ddp, task, rank)
        for _ in range(FIRST_STEPS):
            step()
        return ddp

    return change(build)


def tables(report: Report) -> Iterator[Table]:
    columns = {
        "ms": "{median_ms:.2f}",
        "ratio": RATIO,
        "same bits": "{same_bits}",
    }
    for result in report["workloads"].values():
        for transport, by_change in result["transports"].items():
            where = transport.replace("_", " ")
            yield table_of(f"{result['title']}, {where}", "change", columns, by_change)
