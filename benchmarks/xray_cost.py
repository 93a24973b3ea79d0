"""What does x-ray cost a training step, while it records and while it does not?

    python -m benchmarks.xray_cost     # some minutes

While it records: a wrapper that is recorded races one that is not, and a third one that is not either, whose ratio
shows the noise of two equal things. While it does not record: wherever the core could report an event, it still looks
for a recorder. That is too little to be seen in a step's time, so it is computed: the events of a step, times the time
of a call that finds no recorder. It is an upper bound, as a gradient's hook looks without a call.
"""

from __future__ import annotations

import timeit
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tyro
from torch import nn

from benchmarks.contestants import Contestant, Step, race_workload
from benchmarks.display import StartBar, Table, progress_of
from benchmarks.question import RaceOptions, Report, ask, report_of
from benchmarks.workloads import WorkloadName, workload
from minddp import DistributedDataParallel
from minddp.core.events import Event
from minddp.xray.record import Recorder
from minddp.xray.sources import MinddpSource

OFF, OFF_TOO, ON = "not recorded", "not recorded either", "recorded"
LOOKS = 100_000


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time a training step of minddp with and without an x-ray."""

    LEAST = RaceOptions.LEAST | {"rounds": 2, "warmup_rounds": 2}

    workloads: tuple[WorkloadName, ...] = ("many_small", "transformer")
    rounds: int = 60


class Observer:
    """Counts the events of a step by the wrapper `OFF`, then records the wrapper `ON`."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.recorder: Recorder

    def prepare(self, models: Mapping[str, nn.Module], steps: Mapping[str, Step]) -> None:
        for step in steps.values():
            step()  # the buckets are rebuilt after the first
            step()
        source = MinddpSource(models[OFF])  # type: ignore[arg-type]
        source.watch(self._count)
        steps[OFF]()
        source.unwatch(self._count)
        self.recorder = Recorder(MinddpSource(models[ON]))  # type: ignore[arg-type]
        self.recorder.start()

    def _count(self, event: Event) -> None:
        self.counted[event.kind.name] += 1


class Silent:
    """As the core's emitter of events when it has no recorder."""

    sink = None

    def emit(self, kind: object, subject: int) -> None:
        if self.sink is not None:
            raise AssertionError("there is no recorder")


def main(config: Config) -> None:
    ask("xray_cost", time_workloads, config, tables)


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """One race for each workload, on this rank; returns the report."""
    with progress_of(rank) as start_bar:
        times = {name: time_workload(rank, name, config, start_bar) for name in config.workloads}
    return report_of("time that recording, and being able to record, adds to a step", config, workloads=times)


def time_workload(rank: int, name: WorkloadName, config: Config, start_bar: StartBar) -> dict[str, Any]:
    torch.manual_seed(config.seed)
    task, observer = workload(name, tiny=config.is_smoke), Observer()
    field = [Contestant(key, "steps", OFF, DistributedDataParallel) for key in (OFF, OFF_TOO, ON)]
    turn = config.turn(task.steps_per_turn)
    raced = race_workload(
        rank, field, task, task.model(), config.race_rounds, turn, start_bar, observer.prepare
    )
    recording = observer.recorder.stop()
    asking_us = sum(observer.counted.values()) * look_us()
    return {
        "step_ms": raced.median_ms(OFF),
        "events_per_step": sum(observer.counted.values()),
        "wall": {key: raced.ratio(key, OFF) for key in (OFF_TOO, ON)},
        "cpu": {key: raced.cpu_ratio(key, OFF) for key in (OFF_TOO, ON)},
        "asking_us": asking_us,
        "asking_share": asking_us / 1e3 / raced.median_ms(OFF),
        "events_kept": len(recording.events),
        "events_dropped": recording.dropped,
    }


def look_us() -> float:
    """The time of one call that finds no recorder, in microseconds."""
    return 1e6 * min(timeit.repeat(partial(Silent().emit, None, 0), number=LOOKS)) / LOOKS


def tables(report: Report) -> Iterator[Table]:
    rows = []
    for name, result in report["workloads"].items():
        cells = [name, f"{result['step_ms']:.2f}", f"{result['events_per_step']}"]
        for key in (ON, OFF_TOO):
            ratio = result["wall"][key]
            cells += [f"{ratio['median'] - 1:+.1%}", f"{ratio['low'] - 1:+.1%} to {ratio['high'] - 1:+.1%}"]
        rows.append([*cells, f"{result['asking_us']:.1f} µs, {result['asking_share']:.2%}"])
    yield Table(
        "X-ray",
        ("workload", "step ms", "events", "recorded", "95% interval", "equal", "95% interval", "off"),
        rows,
        "recorded: beside a wrapper that is not. equal: two that are not, beside each other. off: an upper bound.",
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
