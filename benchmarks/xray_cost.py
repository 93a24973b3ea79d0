"""What does x-ray cost a training step, while it records and while it does not?

    python -m benchmarks.xray_cost     # some minutes

While it records: a wrapper that is recorded races one that is not, and a third that is not either, whose ratio is
what the machine alone makes of two equal things. While it does not: the core still asks, wherever there would be
something to tell, whether anybody listens. That is too little to be seen in a step's time, so it is computed: how
often it asks in a step, times what asking takes.
"""

from __future__ import annotations

import copy
import dataclasses
import timeit
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tyro
from rich.console import Console

from benchmarks.display import StartBar, progress_of, table_of
from benchmarks.harness import compare, median_ms, timed_race
from benchmarks.question import RaceOptions, ask, report_of
from benchmarks.workloads import WorkloadName, training_step, workload

OFF, OFF_TOO, ON = "not recorded", "not recorded either", "recorded"


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time a training step of minddp with and without an x-ray."""

    LEAST = RaceOptions.LEAST | {"rounds": 2, "warmup_rounds": 2}

    workloads: tuple[WorkloadName, ...] = ("many_small", "transformer")
    rounds: int = 60
    """Timed rounds."""
    timeout_s: float = 1200.0
    """Give up, and end the ranks, after this long."""


def main(config: Config) -> None:
    ask("xray_cost", time_workloads, config, print_report)


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """Returns the report, ready for JSON."""
    with progress_of(rank) as start_bar:
        times = {name: time_workload(name, rank, config, start_bar) for name in config.workloads}
    return report_of(
        "what recording costs a step, and what being able to record costs one", config, workloads=times
    )


def time_workload(name: WorkloadName, rank: int, config: Config, start_bar: StartBar) -> dict[str, Any]:
    import minddp
    from minddp.xray.record import Recorder
    from minddp.xray.sources import MinddpSource

    task = workload(name)
    torch.manual_seed(config.seed)
    model = task.model()
    wrappers = {key: minddp.DistributedDataParallel(copy.deepcopy(model)) for key in (OFF, OFF_TOO, ON)}
    steps = {key: training_step(ddp, task, rank) for key, ddp in wrappers.items()}
    counted: Counter[str] = Counter()
    for step in steps.values():
        step()  # after the first step the buckets are made anew
        step()
    _count_events(wrappers[OFF], steps[OFF], counted)

    recorder = Recorder(MinddpSource(wrappers[ON]))
    recorder.start()
    bar = partial(start_bar, name)
    wall, cpu = timed_race(steps, [[OFF, OFF_TOO, ON]], config.race_rounds, task.steps_per_turn, bar)
    recording = recorder.stop()
    asking_us = _asking_us(wrappers[OFF], counted)
    return {
        "step_ms": median_ms(wall[OFF]),
        "events_per_step": sum(counted.values()),
        "wall": {key: dataclasses.asdict(compare(wall[key], wall[OFF], config.seed)) for key in (OFF_TOO, ON)},
        "cpu": {key: dataclasses.asdict(compare(cpu[key], cpu[OFF], config.seed)) for key in (OFF_TOO, ON)},
        "asking_us": asking_us,
        "asking_share": asking_us / 1e3 / median_ms(wall[OFF]),
        "events_kept": len(recording.events),
        "events_dropped": recording.dropped,
    }


def _count_events(ddp: Any, step: Any, counted: Counter[str]) -> None:
    """How often each kind of event is told in a step."""
    reducer = ddp._reducer

    def count(event: Any) -> None:
        counted[event.kind.name] += 1

    reducer.events.watch(count)
    step()
    reducer.events.unwatch(count)


def _asking_us(ddp: Any, counted: Counter[str]) -> float:
    """What a step pays for asking whether anybody listens, where nobody does; microseconds.

    A gradient's hook looks at an attribute; everything else calls `Reducer.tell`, which does.
    """
    from minddp.core.events import EventKind

    reducer, repeats = ddp._reducer, 100_000
    tell, countdown, kind = reducer.tell, reducer._countdown, EventKind.BUCKET_READY
    nothing_s = min(timeit.repeat("pass", number=repeats))
    call_s = min(timeit.repeat(lambda: tell(kind, 0), number=repeats)) - min(
        timeit.repeat(lambda: None, number=repeats)
    )
    names = {"countdown": countdown}
    look_s = min(timeit.repeat("countdown.tell_ready is not None", globals=names, number=repeats)) - nothing_s
    gradients = counted["PARAM_READY"]
    calls = sum(counted.values()) - gradients
    return 1e6 * (calls * call_s + gradients * look_s) / repeats


def print_report(report: Mapping[str, Any], console: Console) -> None:
    table = table_of(
        "X-ray", "workload", "step ms", "events", "recorded", "95% interval", "equal", "95% interval", "off"
    )
    for name, row in report["workloads"].items():
        cells = [f"{row['step_ms']:.2f}", f"{row['events_per_step']}"]
        for key in (ON, OFF_TOO):
            ratio = row["wall"][key]
            cells += [f"{ratio['median'] - 1:+.1%}", f"{ratio['low'] - 1:+.1%} to {ratio['high'] - 1:+.1%}"]
        table.add_row(name, *cells, f"{row['asking_us']:.1f} µs, {row['asking_share']:.2%}")
    console.print(table)
    console.print(
        "recorded: beside a wrapper that is not. equal: two that are not, beside each other. off: see above."
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
