"""What does x-ray cost a training step, while it records and while it does not?

    python -m benchmarks.xray_cost     # some minutes

While it records: a wrapper that is recorded races one that is not, and a third one that is not either, whose ratio
shows the noise of two equal things. While it does not record: wherever the core could report an event, it still
compares an attribute with `None`. That is too little to be seen in a step's time, so it is computed: the events of
a step, times the time of one comparison.
"""

from __future__ import annotations

import timeit
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import tyro
from torch import nn

from benchmarks.contestants import Contestant, Step, race_workload
from benchmarks.display import StartBar, Table, progress_of, table_of
from benchmarks.question import RaceOptions, Report, ask, report_of
from benchmarks.workloads import WorkloadName, workload
from minddp import DistributedDataParallel
from minddp.core.events import EventKind
from minddp.xray.record import Recorder
from minddp.xray.sources import MinddpSource

OFF, OFF_TOO, ON = "not recorded", "not recorded either", "recorded"
LOOKS = 100_000


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time a training step of minddp with and without an x-ray."""

    workloads: tuple[WorkloadName, ...] = ("many_small", "transformer")
    rounds: int = 60


def main(config: Config) -> None:
    ask("xray_cost", time_workloads, config, tables)


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """One race for each workload, on this rank; returns the report."""
    with progress_of(rank) as start_bar:
        times = {name: time_workload(rank, name, config, start_bar) for name in config.workloads}
    return report_of("time that recording, and being able to record, adds to a step", config, workloads=times)


def time_workload(rank: int, name: WorkloadName, config: Config, start_bar: StartBar) -> dict[str, Any]:
    field = [Contestant(key, "steps", OFF, DistributedDataParallel) for key in (OFF, OFF_TOO, ON)]
    recorders: list[Recorder] = []

    def record(models: Mapping[str, nn.Module], steps: Mapping[str, Step]) -> None:
        for step in [*steps.values()] * 2:
            step()  # the buckets are rebuilt before the second
        recorders.append(Recorder(MinddpSource(models[ON])))  # type: ignore[arg-type]
        recorders[0].start()

    raced = race_workload(rank, workload(name, config.workload_size), field, config, start_bar, record)
    recording = recorders[0].stop()
    starts = sum(kind is EventKind.FORWARD_BEGIN for _, kind, _ in recording.events)
    events_per_step = round(len(recording.events) / starts)
    asking_us = events_per_step * look_us()
    return {
        "step_ms": raced.median_ms(OFF),
        "events_per_step": events_per_step,
        "wall": {key: raced.ratio(key, OFF) for key in (OFF_TOO, ON)},
        "cpu": {key: raced.cpu_ratio(key, OFF) for key in (OFF_TOO, ON)},
        "asking_us": asking_us,
        "asking_share": asking_us / 1e3 / raced.median_ms(OFF),
        "events_kept": len(recording.events),
        "events_dropped": recording.dropped,
    }


def look_us() -> float:
    """The time of one comparison that finds no recorder, in microseconds."""
    looking = partial(timeit.repeat, "core.sink is None", globals={"core": SimpleNamespace(sink=None)})
    return 1e6 * min(looking(number=LOOKS)) / LOOKS


def tables(report: Report) -> Iterator[Table]:
    columns = {
        "step ms": "{step_ms:.2f}",
        "events": "{events_per_step}",
        ON: f"{{wall[{ON}][median]:.3f}} ({{wall[{ON}][low]:.3f}}–{{wall[{ON}][high]:.3f}})",
        OFF_TOO: f"{{wall[{OFF_TOO}][median]:.3f}} ({{wall[{OFF_TOO}][low]:.3f}}–{{wall[{OFF_TOO}][high]:.3f}})",
        "off": "{asking_us:.1f} µs, {asking_share:.2%}",
    }
    yield table_of("X-ray: time beside a wrapper that is not recorded", "workload", columns, report["workloads"])


if __name__ == "__main__":
    main(tyro.cli(Config))
