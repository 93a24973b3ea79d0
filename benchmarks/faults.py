"""What do killed processes cost a training that survives them: by minddp.elastic, and by restarts?

    python -m benchmarks faults     # some minutes

The same model and data (benchmarks/faults_training.py) each way, once undisturbed, and once with a process killed
at certain steps. It is started again at once. Time runs from the first step to the last, so that starting counts
only after a loss.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.display import Table, console_of, table_of
from benchmarks.faults_training import CHECKPOINT_EVERY
from benchmarks.question import Options, Report, report_of, write
from minddp.platform.host import is_running

Event = dict[str, Any]
LINGER_S = 10.0  # from the end of the first process until those that still run are killed
TITLES = {
    "elastic": "minddp.elastic",
    "restart": f"torchrun --max-restarts, a checkpoint each {CHECKPOINT_EVERY} steps",
}


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Kill processes of a training, and measure the cost."""

    world_size: int = 4
    steps: int = 200
    kills: int = 3
    """Evenly spaced over the steps, on one rank after another; fewer than ranks, as it may be that none comes back
    before the last step, and with the last rank the state would be lost."""
    timeout_s: float = 120.0
    """Give up a training without a further step for this long."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.kills < self.world_size:
            raise ValueError(f"kills is {self.kills}; it must be below world_size, {self.world_size}.")


def main(config: Config) -> None:
    steps = 30 if config.size == "smoke" else config.steps
    spacing = steps // (config.kills + 1)
    kills = [(spacing * (i + 1), (i + 1) % config.world_size) for i in range(config.kills)]
    ways = {}
    for way, title in TITLES.items():
        calm = train(way, config, steps, [])
        ways[title] = outcome(train(way, config, steps, kills), calm)
        report = report_of("the cost of killed processes", config, steps=steps, kills=kills, ways=ways)
        if (path := config.path("faults")) is not None:  # after each way: each takes minutes
            write(report, path)
    for table in tables(report):
        table.show(console_of())


def tables(report: Report) -> Iterator[Table]:
    columns = {
        "undisturbed": "{calm_s:.1f} s",
        f"{len(report['kills'])} kills": "{disturbed_s:.1f} s",
        "longest without a step": "{longest_s:.1f} s",
        "same bits": "{same_bits}",
    }
    yield table_of("Killed processes: time to the last step", "way", columns, report["ways"])


# ------------------------------------------------------------------ one training


def train(way: str, config: Config, steps: int, kills: Sequence[tuple[int, int]]) -> list[Event]:
    """The events of a training in which the process in `place` is killed once `step` has counted, for each kill.

    Raises:
        TimeoutError: no further step for `config.timeout_s`.
        RuntimeError: it has ended before the last step, or without all of the kills.
    """
    with tempfile.TemporaryDirectory(prefix="minddp-benchmark-") as folder:
        process = launcher(way, folder, steps, config.world_size, len(kills))
        events: list[Event] = []
        due, ends_at, deadline = list(kills), float("inf"), time.monotonic() + config.timeout_s
        try:
            while process.poll() is None and time.monotonic() < min(deadline, ends_at):
                time.sleep(0.02)
                before, events = len(events), events_of(folder)
                if len(events) > before:
                    deadline = time.monotonic() + config.timeout_s
                if of("end", events):
                    ends_at = min(ends_at, time.monotonic() + LINGER_S)
                elif due and max((event["step"] for event in of("step", events)), default=-1) >= due[0][0]:
                    places = {event["pid"]: event["place"] for event in of("step", events)}
                    at_work = sorted((place, pid) for pid, place in places.items() if is_running(pid))
                    if len(at_work) > 1:  # else killed ones have not come back yet
                        os.kill(at_work[due.pop(0)[1] % len(at_work)][1], signal.SIGKILL)
        finally:
            process.terminate()
            process.wait(60)  # launchers give their ranks 30 s
        events = events_of(folder)
        said = Path(folder, "stderr").read_text(errors="replace")[-2000:]
    if time.monotonic() >= deadline:
        raise TimeoutError(f"{way} made no step for {config.timeout_s:g} s; raise --timeout-s.\n{said}")
    if due or not of("end", events):
        raise RuntimeError(f"{way} has ended early, {len(due)} kills before its last step.\n{said}")
    return events


def events_of(folder: str) -> list[Event]:
    """The events that processes have written to files in `folder`, in order of time."""
    lines = [line for path in Path(folder).glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return sorted(whole, key=lambda event: event["time"])


def of(kind: str, events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def launcher(way: str, folder: str, steps: int, world_size: int, restarts: int) -> subprocess.Popen[bytes]:
    """The command that starts all processes."""
    module = ["minddp", "elastic"] if way == "elastic" else ["torch.distributed.run", "--standalone"]
    number = "--nproc" if way == "elastic" else "--nproc-per-node"
    options = [number, str(world_size), "--max-restarts", str(restarts), "-m", "benchmarks.faults_training"]
    # torchrun keeps its store at a restart, and with it gloo's addresses of processes that are gone: some connect
    # there, and fail. With this each start has a store of its own.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Path(folder, "stderr").open("wb") as said:
        command = [sys.executable, "-m", *module, *options, way, folder, str(steps)]
        return subprocess.Popen(command, env=env, stderr=said)


# ------------------------------------------------------------------ the cost


def outcome(disturbed: Sequence[Event], calm: Sequence[Event]) -> dict[str, Any]:
    """The figures of one way."""
    times = [event["time"] for event in of("step", disturbed)]
    digests = [{event["digest"] for event in of("end", events)} for events in (disturbed, calm)]
    return {
        "calm_s": duration_s(calm),
        "disturbed_s": duration_s(disturbed),
        "longest_s": max(later - earlier for earlier, later in pairwise(times)),
        "same_bits": "yes" if digests[0] == digests[1] and len(digests[0]) == 1 else "no",
    }


def duration_s(events: Sequence[Event]) -> float:
    """From the first step to the last."""
    times = [event["time"] for event in events if event["event"] in ("begin", "step")]
    return times[-1] - times[0]
