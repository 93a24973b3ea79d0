"""What is said while it takes time."""

from __future__ import annotations

import io

from rich.console import Console

from minddp.doctor.progress import Progress


def said(is_main: bool, waits_s: tuple[float, ...], **options: bool) -> str:
    out = io.StringIO()
    progress = Progress(Console(file=out, **options), is_main, "rank 1")  # type: ignore[arg-type]
    progress.stage("calling the roll")
    for waited_s in waits_s:
        progress.waiting_for_ranks([2, 3], waited_s)
    progress.stop()
    return out.getvalue()


def test_a_log_is_told_once_and_only_of_long_waits() -> None:
    assert said(True, (0.1, 4.0)) == ""
    assert said(True, (4.0, 6.0, 7.0)) == "rank 1: waiting for ranks 2, 3\n"


def test_a_terminal_sees_what_goes_on_and_nothing_stays() -> None:
    seen = said(True, (0.1,), force_terminal=True)
    assert "calling the roll" in seen or "waiting for ranks 2, 3" in seen
    assert "rank 1:" not in seen


def test_other_ranks_on_a_terminal_do_not_draw() -> None:
    assert said(False, (0.1,), force_terminal=True) == ""
