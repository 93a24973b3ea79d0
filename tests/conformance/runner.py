"""Run tests of several suites, one suite after another, each on some stages, and report every verdict at once."""

from __future__ import annotations

import os
import tempfile
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
        jobs: stages, and so tests, at once. A test starts two to four ranks, which mostly wait.
        limit_s: a test still running after so long is killed.
    """

    jobs: int = os.cpu_count() or 1
    limit_s: float = 90.0


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
    for suite, some in by_suite(tests, suites).items():
        shares = [tuple(some[first :: conditions.jobs]) for first in range(min(conditions.jobs, len(some)))]
        programmes = [Programme(suite, subject, share, conditions.limit_s, logs) for share in shares]
        for verdict in _answers(programmes):
            verdicts[verdict.test] = verdict
            on_verdict(verdict)
    return [verdicts.get(test) or Verdict(test, Status.FAIL, 0.0, "its stage was killed") for test in tests]


def _answers(programmes: Sequence[Programme]) -> Iterator[Verdict]:
    """Stages are forked by a server, since this process may have threads; each forks from a single thread, too."""
    stages: dict[Connection, Any] = {}
    with tempfile.TemporaryDirectory(prefix="conformance-", ignore_cleanup_errors=True) as folder:
        try:
            for programme in programmes:
                ours, theirs = CONTEXT.Pipe(duplex=False)
                stages[ours] = CONTEXT.Process(target=serve, args=(programme, folder, theirs))
                stages[ours].start()
                theirs.close()
            while stages:
                for ready in wait(list(stages)):
                    pipe = cast("Connection", ready)
                    try:
                        yield pipe.recv()
                    except (EOFError, OSError):  # closed, perhaps in the middle of an answer
                        stages.pop(pipe).join(10)
        finally:
            for process in stages.values():
                process.terminate()
                process.join(10)
