"""Jobs whose ranks die, stop and come back: real processes, a store outside of them, and a report of all events.

In place of the launcher, whose processes take seconds to import torch, ranks are forked from the server of
tests/ranks.py; the launcher has a test of its own.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests import ranks

IN_RANKS = {
    "RES_OPTIONS": "timeout:1 attempts:1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}  # as minddp.tools.elastic.launcher


def _run(plan: dict[str, Any], port: int, num_ranks: int) -> None:
    os.environ.update(IN_RANKS, MINDDP_ELASTIC_PORT=str(port), MINDDP_ELASTIC_RANKS=str(num_ranks))
    os.environ["PLAN"] = json.dumps(plan)
    error = os.open(f"{plan['folder']}/{os.getpid()}.err", os.O_CREAT | os.O_WRONLY)
    os.dup2(error, 2)
    from tests.tools.elastic.survivor import main

    main()


class Job:
    """`num_ranks` processes of tests/tools/elastic/survivor.py, with `restarts` for those that die."""

    def __init__(self, num_ranks: int, restarts: int = 0, **plan: Any):
        self.folder = tempfile.TemporaryDirectory(prefix="minddp-elastic-")
        self.plan = {"folder": self.folder.name, "steps": 12, **plan}
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.num_ranks = num_ranks
        self.restarts = restarts
        self.processes: list[Any] = []
        self.seen_to_fail: set[int] = set()
        self.read_to: dict[Path, int] = {}
        self.events_so_far: list[dict[str, Any]] = []
        for _ in range(num_ranks):
            self.start()

    def start(self) -> Any:
        process = ranks.CONTEXT.Process(target=_run, args=(self.plan, self.store.port, self.num_ranks), daemon=True)
        process.start()
        self.processes.append(process)
        return process

    def alive(self) -> list[Any]:
        return [process for process in self.processes if process.is_alive()]

    def attend(self) -> bool:
        """Start processes again that have died. Returns False once all have ended."""
        for process in self.processes:
            failed = not process.is_alive() and process.exitcode != 0
            if failed and process.pid not in self.seen_to_fail:
                self.seen_to_fail.add(process.pid)
                if self.restarts > 0:
                    self.restarts -= 1
                    self.start()
                    break
        return bool(self.alive())

    def wait_for(self, is_so: Callable[[list[dict[str, Any]]], bool], limit_s: float = 60.0) -> None:
        """Return once `is_so(events)`."""
        deadline = time.monotonic() + limit_s
        while not is_so(self.events()):
            if not self.alive() or time.monotonic() > deadline:
                raise AssertionError(self.account()[-4000:])
            time.sleep(0.05)

    def wait(self, limit_s: float = 60.0) -> list[dict[str, Any]]:
        """The events of all processes, by time, once they have ended.

        The limit is on the time without a further step or end; processes that still run then are killed.
        """
        progress, deadline = None, time.monotonic() + limit_s
        try:
            while self.attend() and time.monotonic() < deadline:
                time.sleep(0.05)
                ends = sum(process.exitcode == 0 for process in self.processes)
                if (latest := (self.highest_step(), ends)) != progress:
                    progress, deadline = latest, time.monotonic() + limit_s
            hanging = [process.pid for process in self.alive()]
            assert not hanging, f"{len(hanging)} of {len(self.processes)} still run.\n{self.account()[-4000:]}"
            return self.events()
        finally:
            self.end()

    def end(self) -> None:
        for process in self.alive():
            process.kill()
        for process in self.processes:
            process.join(5)

    def highest_step(self) -> int:
        """The last one that has counted."""
        return max((event["step"] for event in self.events() if event["event"] == "step"), default=-1)

    def failures(self) -> list[int]:
        """The exit codes of processes that were not killed, and have failed."""
        return [process.exitcode for process in self.processes if process.exitcode not in (0, -signal.SIGKILL)]

    def events(self) -> list[dict[str, Any]]:
        """Those so far, by time."""
        for path in Path(self.folder.name).glob("*.jsonl"):
            with path.open("rb") as report:
                report.seek(self.read_to.get(path, 0))
                lines, newline, _ = report.read().rpartition(b"\n")  # the last one may not be whole yet
            self.read_to[path] = self.read_to.get(path, 0) + len(lines) + len(newline)
            self.events_so_far += map(json.loads, lines.splitlines())
        self.events_so_far.sort(key=lambda event: event["time"])
        return self.events_so_far

    def account(self) -> str:
        """The events as text for a failing test."""
        lines = []
        start = None
        for event in self.events():
            start = start or event["time"]
            facts = {key: value for key, value in event.items() if key not in ("time", "event")}
            lines.append(f"{event['time'] - start:8.3f} {event['event']:8} {facts}")
        said = [path.read_text()[:900] + path.read_text()[-300:] for path in Path(self.folder.name).glob("*.err")]
        return "\n".join([*lines, *filter(None, said), str([process.exitcode for process in self.processes])])


def digests(events: list[dict[str, Any]]) -> list[str]:
    """The digests of the ranks that have come to the end."""
    return [event["digest"] for event in events if event["event"] == "end"]
