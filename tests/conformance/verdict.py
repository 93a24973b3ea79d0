"""The outcome of a test: its status, and in one line the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from tests.conformance.selection import TestId


class Status(str, Enum):
    PASS = "pass"
    FAIL = "fail"
    TIMEOUT = "timeout"
    SKIP = "skip"
    VACUOUS = "vacuous"  # passed without building the class under test, so it says nothing
    ABSENT = "absent"  # the installed torch has no such test


@dataclass(frozen=True)
class Report:
    """The report of a fork on the test that it ran. `text` is a traceback, the reason for a skip, or empty."""

    status: Status
    text: str
    constructions: int


@dataclass(frozen=True)
class Verdict:
    """`detail` is the end of the traceback, empty unless the test failed."""

    test: TestId
    status: Status
    seconds: float
    reason: str = ""
    detail: str = ""

    def after_hanging(self) -> Verdict:
        """The same of a second attempt."""
        return replace(self, reason=f"the first attempt hung. {self.reason}".strip())


_DETAIL_CHARACTERS = 6000
_EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception|Warning|Failure|Exit)\b.*$", re.MULTILINE)
_ABOUT_A_PROCESS = re.compile(r"RuntimeError: Process \d+ (?:exited|terminated)")
_RANKS_WERE_TOO_SLOW = re.compile(r"Process \d+ terminated or timed out after")


def judge(test: TestId, report: Report | None, seconds: float, log: str, limit_s: float) -> Verdict:
    """The verdict on a test whose fork left `report` (None if it died or was killed) and wrote `log`."""
    seconds = round(seconds, 1)
    if report is None:
        if seconds >= limit_s:
            return Verdict(test, Status.TIMEOUT, seconds, f"killed after {limit_s:g} s", _end_of(log))
        return Verdict(test, Status.FAIL, seconds, "the process died", _end_of(log))
    status = report.status
    if status is Status.FAIL and _RANKS_WERE_TOO_SLOW.search(report.text):
        status = Status.TIMEOUT
    if status is Status.PASS and report.constructions == 0:
        return Verdict(test, Status.VACUOUS, seconds, "passed without building what is tested")
    if status in (Status.FAIL, Status.TIMEOUT):
        return Verdict(test, status, seconds, telling_line(report.text), _end_of(report.text))
    return Verdict(test, status, seconds, report.text)


def telling_line(traceback: str) -> str:
    """The last `SomeError: ...` line that is not merely about a rank having exited."""
    found = _EXCEPTION.findall(traceback)
    telling = [line for line in found if not _ABOUT_A_PROCESS.match(line)]
    return (telling or found or traceback.strip().splitlines() or ["no reason given"])[-1]


def _end_of(text: str) -> str:
    return text[-_DETAIL_CHARACTERS:]
