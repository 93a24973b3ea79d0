"""The table in docs/stuck.md: what counts as a diagnosis that names the cause, and that the page's is complete."""

from __future__ import annotations

import re

import pytest

from tests.tools.doctor.stuck_page import PAGE
from tests.tools.watchdog.stuck import SCENARIOS, Played
from tests.tools.watchdog.time_to_diagnosis import CAUSES, Timed, default_limit_s, table, time, timed


def test_a_diagnosis_counts_if_it_names_the_cause() -> None:
    waits = Played(
        "Stuck: Rank 1 has dropped the module.",
        61.0,
        [(10.1, "All is well."), (20.2, "Rank 1 accumulates under no_sync")],
    )
    assert timed("accumulates_alone", [waits, Played(ended_after_s=70.0)]) == Timed(
        "accumulates_alone", 20.2, 61.0, 61.0
    )
    raises = Played("Stuck: Rank 1 has exited", 1.5)
    assert timed("dies", [raises, Played("Stuck: Rank 1 was killed", 2.5)]) == Timed("dies", 1.5, 1.5, 2.5)
    assert timed("dies", [Played()]) == Timed("dies", None, None, None)


def test_a_table_counts_what_is_named_in_time() -> None:
    shown = table([Timed("dies", 1.5, 1.5, 2.5), Timed("sleeps", 20.1, None, None)])
    assert "| `dies` | 1.5 s | 1.5 s to 2.5 s |" in shown
    assert "| `sleeps` | 20.1 s | go on |" in shown
    assert shown.endswith("Within 20 s: 1 of 2 scenarios.")


@pytest.mark.slow
def test_a_scenario_is_timed() -> None:
    found = time("dies")
    assert found.scenario == "dies"
    assert found.named_s is not None
    assert found.first_raised_s is not None


def test_the_page_shows_a_cause_within_20_seconds_for_every_scenario() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) s \|", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == list(SCENARIOS) == list(CAUSES)
    assert all(float(seconds) <= 20 for _, seconds in rows)
    assert default_limit_s() == 10
