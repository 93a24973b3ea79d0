"""Everything that is text in, text out: verdicts, lists, reports."""

from __future__ import annotations

from tests.conformance import report
from tests.conformance.selection import TestId
from tests.conformance.verdict import Status, Verdict, telling_line

TEST = TestId("ddp", "A.test_b")


# ------------------------------------------------------------------ verdicts


def test_the_reason_is_the_exception_in_a_ranks_traceback() -> None:
    text = (
        "Traceback (most recent call last):\nRuntimeError: Process 0 exited with error code 10 and exception:\n"
        "Traceback (most recent call last):\nAssertionError: Tensor-likes are not close!\n\nMismatched: 9 / 9\n"
    )
    assert telling_line(text) == "AssertionError: Tensor-likes are not close!"
    assert telling_line("RuntimeError: Process 1 terminated") == "RuntimeError: Process 1 terminated"
    assert telling_line("") == "no reason given"


# ------------------------------------------------------------------ reports


def test_only_what_passes_natively_is_compared() -> None:
    other = TestId("ddp", "A.test_c")
    native = [Verdict(TEST, Status.PASS, 1.0), Verdict(other, Status.SKIP, 0.1, "no GPU")]
    failing = Verdict(TEST, Status.FAIL, 1.0, "ValueError: a | b in /home/someone/x.py")
    row, not_compared = report.compare(native, [failing])
    assert (row.conforms, not_compared.conforms) == (False, True)
    table = report.table([row, not_compared], "pkg:Class", "python -m it")
    assert "| test_b | pass | fail | ValueError: a \\| b in x.py |" in table
    assert "| test_c | skip | not run | no GPU |" in table
    assert "- torch's own class: 1 pass, 1 skip\n- `pkg:Class`, where torch's own passes: 1 fail" in table


def test_tests_that_pass_with_both_are_listed_by_name() -> None:
    row = report.Row(Verdict(TEST, Status.PASS, 1.0), Verdict(TEST, Status.PASS, 1.0))
    table = report.table([row], "pkg:Class", "python -m it")
    assert "<summary>1 test: pass with both</summary>\n\n- test_b\n" in table
    assert "| test |" not in table
