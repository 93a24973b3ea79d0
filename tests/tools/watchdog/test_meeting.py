"""The report on ranks that do not meet, given who has come. Real jobs: tests/tools/launch/test_meeting.py."""

from __future__ import annotations

from minddp.tools.watchdog.meeting import diagnose


def test_a_missing_rank_is_named() -> None:
    assert diagnose({0: [], 2: []}, 4).startswith("Ranks 0 and 2 have come. Ranks 1 and 3 have not: ")


def test_what_a_script_has_changed_is_named() -> None:
    text = diagnose({0: [], 1: ["RANK is 0 instead of 1"]}, 2)
    assert text.startswith("Ranks 0 and 1 have come. On rank 1 RANK is 0 instead of 1. Leave these variables as")


def test_when_all_have_come_it_is_the_network() -> None:
    assert "`minddp doctor`" in diagnose({0: [], 1: [], 2: []}, 3)
