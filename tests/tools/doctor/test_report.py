"""Findings, and the report on them."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from minddp.platform import wording
from minddp.tools.doctor.report import CheckResult, Report, Severity, differing, judged, show

FINE = CheckResult("cores", Severity.FINE, "a: 2 ranks with 2 threads on 2 cores.")
NOTE = CheckResult("memory", Severity.NOTE, "a: 1 GiB free [of 2].", "Start fewer ranks.")
BROKEN = CheckResult(
    "network", Severity.BROKEN, "No connection from rank 1 to rank 0 at 10.0.0.1.", "Open the firewall."
)

PLAIN = """\
minddp doctor: 2 ranks on 2 hosts

fine    cores    a: 2 ranks with 2 threads on 2 cores.
note    memory   a: 1 GiB free [of 2].
                 -> Start fewer ranks.
BROKEN  network  No connection from rank 1 to rank 0 at
                 10.0.0.1.
                 -> Open the firewall.

1 thing is broken; 1 thing is worth knowing. Not checked
because of that: load, collectives.
"""


def shown(*findings: CheckResult, **options: object) -> str:
    """The report, without the spaces at the ends of lines."""
    out = io.StringIO()
    not_checked = ["load", "collectives"] if BROKEN in findings else []
    report = Report("minddp doctor: 2 ranks on 2 hosts", findings, not_checked)
    show(report, Console(file=out, width=56, highlight=False, **options))  # type: ignore[arg-type]
    return re.sub(r" +(\x1b\[0m)?$", r"\1", out.getvalue(), flags=re.MULTILINE)


def test_the_layout() -> None:
    assert shown(FINE, NOTE, BROKEN) == PLAIN


@pytest.mark.parametrize(
    ("findings", "status", "conclusion"),
    [
        ([FINE], 0, "Nothing is broken."),
        ([FINE, NOTE, NOTE], 0, "Nothing is broken; 2 things are worth knowing."),
        ([BROKEN, FINE], 1, "1 thing is broken. Not checked because of that: load, collectives."),
    ],
)
def test_the_exit_status_and_the_conclusion(findings: list[CheckResult], status: int, conclusion: str) -> None:
    assert Report("title", findings).exit_status == status
    assert " ".join(shown(*findings).split()).endswith(conclusion)


def test_the_most_frequent_value_comes_first() -> None:
    values = {0: "b", 1: "a", 2: "a", 3: "c"}
    assert list(wording.by_value(values).items()) == [("a", [1, 2]), ("b", [0]), ("c", [3])]
    assert differing(values) == "a on ranks 1 and 2; b on rank 0; c on rank 3"


def test_a_check_without_problems_is_fine() -> None:
    assert judged("cores", iter([]), FINE.fact) == [FINE]
    assert judged("memory", iter([NOTE]), "unused") == [NOTE]
