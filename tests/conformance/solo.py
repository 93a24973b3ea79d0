"""One test, in a process that a stage has forked for it: the test module is imported already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import traceback
import unittest
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from tests.conformance import swap
from tests.conformance.verdict import Report, Status

LOG, REPORT = "log.txt", "report.json"


def perform(module: ModuleType, case: str, folder: Path) -> NoReturn:
    """Run `Class.method` of `module` in the empty `folder`, leave a log and a report there, and exit.

    The process leads a session of its own, so that the processes that it starts are killed with it.
    """
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ranks are ended by it
        _settle_in(folder)
        swap.start_tally(folder / "tally")
        report = _run(module, case)
        _write(report, folder)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _settle_in(folder: Path) -> None:
    """Output into the log, temporary files into the folder, which also becomes the working directory."""
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def _run(module: ModuleType, case: str) -> Report:
    class_name, _, method = case.partition(".")
    if not hasattr(getattr(module, class_name, None), method):
        return Report(Status.ABSENT, "the installed torch has no such test", 0)
    try:
        suite = unittest.defaultTestLoader.loadTestsFromName(case, module)
        result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2).run(suite)
    except BaseException:
        return Report(Status.FAIL, traceback.format_exc(), swap.constructions())
    return Report(*_outcome(result), swap.constructions())


def _outcome(result: unittest.TestResult) -> tuple[Status, str]:
    for _, text in (*result.errors, *result.failures):
        return Status.FAIL, text
    for _, why in result.skipped:
        return Status.SKIP, why
    if result.unexpectedSuccesses:
        return Status.FAIL, "passed, although it is marked as an expected failure"
    if not result.testsRun:
        return Status.FAIL, "no test ran"
    return Status.PASS, ""


def _write(report: Report, folder: Path) -> None:
    unfinished = folder / "report.unfinished"
    unfinished.write_text(json.dumps(asdict(report)))
    unfinished.rename(folder / REPORT)


def read_report(folder: Path) -> Report | None:
    """The report that `perform` wrote there, if it got so far."""
    with contextlib.suppress(FileNotFoundError):
        stored = json.loads((folder / REPORT).read_text())
        return Report(Status(stored.pop("status")), **stored)
    return None
