"""Which of minddp's optimisations earn their place: how long does a step take without each of them?

    python -m benchmarks.earned                # about five minutes on two cores
    python -m benchmarks.earned --size quick   # a look

Each workload is trained by wrappers that differ in one switch of `SWITCHES`, turn by turn, over the process group
and in shared memory. The ratio is the time of a step without an optimisation as a multiple of the time with all of
them. An optimisation earns its place on a workload if that is at least 1 + `WORTH` and the interval excludes 1.

[Note: a switch covers the first steps]
An optimisation is chosen where buckets are made: in the constructor, and again in a forward when they are rebuilt
in the order of the first backward. So a switch is a function `without_x(build)` that holds its optimisation off
while `build()` constructs a wrapper and takes its first steps. All wrappers take the same first steps, so the
weights of all stay equal, and the race checks that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

import tyro
from torch import nn

from benchmarks.contestants import Contestant, Raced, minddp_over, race_workload
from benchmarks.display import RATIO, StartBar, Table, progress_of, table_of
from benchmarks.harness import in_ms
from benchmarks.question import RaceOptions, Report, ask, report_of
from benchmarks.workloads import Workload, WorkloadName, training_step, workload
from minddp.acceleration import gradient_aliasing
from minddp.core import packing
from minddp.transport import spin_wait

Build = Callable[[], nn.Module]
Switch = Callable[[Build], nn.Module]

ALL = "none"
WORTH = 0.03
FIRST_STEPS = 4  # buckets are rebuilt before the second step


def as_it_is(build: Build) -> nn.Module:
    return build()


def without_any(build: Build) -> nn.Module:
    """The switch that users have; the constructor reads it."""
    with mock.patch.dict(os.environ, MINDDP_ACCELERATION="off"):
        return build()


def without_gradient_aliasing(build: Build) -> nn.Module:
    """Averages are copied back into every gradient."""
    with mock.patch.object(gradient_aliasing, "SMALLEST_BYTES", sys.maxsize):
        return build()


def without_spin_wait(build: Build) -> nn.Module:
    """A waiting rank sleeps at once."""
    with mock.patch.object(spin_wait, "SPIN_LIMIT_S", 0.0):
        return build()


def without_packing_groups(build: Build) -> nn.Module:
    """Each gradient is packed by itself as soon as it arrives."""
    with mock.patch.object(packing, "LARGE_BYTES", 0):
        return build()


SWITCHES: Mapping[str, Switch] = {
    ALL: as_it_is,
    "any of them": without_any,
    "gradient aliasing": without_gradient_aliasing,
    "spin wait": without_spin_wait,
    "packing groups": without_packing_groups,
}


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time a training step without each of minddp's optimisations."""

    workloads: tuple[WorkloadName, ...] = ("many_small", "transformer", "wide_mlp", "convnet", "short")
    transports: tuple[Literal["process_group", "shared_memory"], ...] = ("process_group", "shared_memory")
    rounds: int = 48
    """Timed rounds; a multiple of the contestants in all heats is exactly fair."""
    timeout_s: float = 7200.0


def main(config: Config) -> None:
    ask("earned", time_workloads, config, tables)


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """One race for each workload, on this rank; returns the report."""
    with progress_of(rank) as start_bar:
        timed = {name: time_workload(rank, name, config, start_bar) for name in config.workloads}
    question = "time of a step without an optimisation as a multiple of the time with all"
    return report_of(question, config, worth=WORTH, workloads=timed)


def time_workload(rank: int, name: WorkloadName, config: Config, start_bar: StartBar) -> dict[str, Any]:
    task = workload(name, config.workload_size)
    field = field_of(config.transports, task, rank)
    raced = race_workload(rank, task, field, config, start_bar)
    return raced.described() | {
        "transports": {
            transport: {c.name.partition(",")[0]: figures(c, raced) for c in field if c.heat == transport}
            for transport in config.transports
        },
        "rounds_ms": in_ms(raced.wall),
    }


def field_of(transports: Sequence[str], task: Workload, rank: int) -> list[Contestant]:
    """A heat for each transport: all optimisations, then a wrapper for each switch."""
    return [
        Contestant(
            f"{switch}, {transport}",
            transport,
            f"{ALL}, {transport}",
            partial(wrapped_and_trained, without, transport, task, rank),
            transport=transport,
        )
        for transport in transports
        for switch, without in SWITCHES.items()
    ]


def wrapped_and_trained(without: Switch, transport: str, task: Workload, rank: int, model: nn.Module) -> nn.Module:
    """See [Note: a switch covers the first steps]. Collective."""

    def build() -> nn.Module:
        ddp = minddp_over(transport)(model)
        step = training_step(ddp, task, rank)
        for _ in range(FIRST_STEPS):
            step()
        return ddp

    return without(build)


def figures(contestant: Contestant, raced: Raced) -> dict[str, Any]:
    """The figures of one contestant, beside all optimisations over the same transport. Collective."""
    assert contestant.baseline is not None, "none is a floor"
    ratio = raced.ratio(contestant.name, contestant.baseline)
    return {
        "median_ms": raced.median_ms(contestant.name),
        "ratio": ratio,
        "cpu_ratio": raced.cpu_ratio(contestant.name, contestant.baseline),
        "earns": earns(ratio.median, ratio.low),
        "same_bits": raced.same_bits(contestant),
    }


def earns(median: float, low: float) -> bool:
    """The verdict on the ratio of an optimisation, by its median and the lower end of its interval."""
    return median >= 1 + WORTH and low > 1


def tables(report: Report) -> Iterator[Table]:
    columns = {"ms": "{median_ms:.2f}", "ratio": RATIO, "cpu": "{cpu_ratio[median]:.3f}"}
    columns |= {"earns its place": "{earns}", "same bits": "{same_bits}"}
    earning: dict[str, list[str]] = {switch: [] for switch in SWITCHES if switch != ALL}
    for name, result in report["workloads"].items():
        for transport, by_switch in result["transports"].items():
            where = transport.replace("_", " ")
            yield table_of(f"{result['title']}, {where}", "without", columns, by_switch)
            for switch, of in by_switch.items():
                if of["earns"]:
                    earning[switch].append(f"{name} ({where})")
    rows = [[switch, ", ".join(places) or "nowhere"] for switch, places in earning.items()]
    yield Table(f"At least {report['worth']:.0%} slower without it, 1 outside of the interval", ["", "on"], rows)


if __name__ == "__main__":
    main(tyro.cli(Config))
