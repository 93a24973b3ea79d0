"""Run tests of several suites at once, each suite on its stage, and report every verdict at once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from tests.conformance.selection import Suite, TestId, by_suite
from tests.conformance.stage import Programme, serve
from tests.conformance.verdict import Status, Verdict
from tests.ranks import CONTEXT


@dataclass(frozen=True)
class Conditions:
    """Conditions under which tests are run.

    Attributes:
        jobs: tests (or imports of suites) at once. A test starts two to four ranks, which mostly wait.
        limit_s: a test still running after so long is killed.
        world_size: ranks of those tests that leave it open.
    """

    jobs: int = os.cpu_count() or 1
    limit_s: float = 90.0
    world_size: int = 2


def run(
    tests: Sequence[TestId],
    suites: Sequence[Suite],
    subject: str,
    conditions: Conditions,
    *,
    logs: Path | None = None,
    on_verdict: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """Run `tests` with the class `subject` in DDP's place; verdicts in the order of `tests`.

    `logs` is emptied; the output of tests that fail is kept there.
    """
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        for stale in logs.glob("*.txt"):
            stale.unlink()
    verdicts: dict[TestId, Verdict] = {}
    programmes = [
        Programme(suite, subject, tuple(some), conditions.limit_s, conditions.world_size, logs)
        for suite, some in by_suite(tests, suites).items()
    ]
    for verdict in _answers(programmes, conditions.jobs):
        verdicts[verdict.test] = verdict
        on_verdict(verdict)
    return [verdicts.get(test) or Verdict(test, Status.FAIL, 0.0, "its stage was killed") for test in tests]


def discover(suites: Sequence[Suite], subject: str, conditions: Conditions) -> tuple[list[TestId], list[str]]:
    """The tests about DDP in all suites, and the errors of those suites that cannot be imported."""
    programmes = [Programme(suite, subject, None, conditions.limit_s, conditions.world_size) for suite in suites]
    answers = list(_answers(programmes, conditions.jobs))
    found = [test for answer in answers if isinstance(answer, list) for test in answer]
    return sorted(found), [answer for answer in answers if isinstance(answer, str)]


def _answers(programmes: Sequence[Programme], jobs: int) -> Iterator[Any]:
    """Whatever the stages send. A few exist at a time: while some run tests, the next one is importing."""
    waiting = deque(programmes)
    stages: dict[Connection, Any] = {}
    folder = tempfile.mkdtemp(prefix="conformance-")  # also for the stages' files, as a stage may be killed
    slots = Path(folder) / "slots"
    slots.touch()
    try:
        while waiting or stages:
            while waiting and len(stages) <= jobs:
                pipe, process = _start_stage(waiting.popleft(), slots, jobs)
                stages[pipe] = process
            for ready in wait(list(stages)):
                pipe = cast("Connection", ready)
                try:
                    yield pipe.recv()
                except (EOFError, OSError):  # closed, perhaps in the middle of an answer
                    stages.pop(pipe).join(10)
    finally:
        for process in stages.values():
            process.terminate()
        for process in stages.values():
            process.join(10)
        shutil.rmtree(folder, ignore_errors=True)


def _start_stage(programme: Programme, slots: Path, jobs: int) -> tuple[Connection, Any]:
    """Forked by the server, since the calling process may have threads. A stage also forks from a single thread."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=serve, args=(programme, slots, jobs, theirs))
    process.start()
    theirs.close()
    return ours, process
