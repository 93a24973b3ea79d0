"""Jobs that really get stuck: what the waiting ranks report, and when they raise.

All scenarios of `stuck.py` are played at once, each by three ranks of its own: they mostly sleep.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.tools.watchdog.stuck import FAULTY, SCENARIOS, Played
from tests.tools.watchdog.time_to_diagnosis import Timed, play, timed

OTHERS = (0, 2)
ENDING = [name for name, scenario in SCENARIOS.items() if scenario.end]
pytestmark = pytest.mark.timeout(300)  # of the fixture, in which 33 processes begin at once
Outcomes = Mapping[int, str]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcomes]:
    with ThreadPoolExecutor(len(SCENARIOS)) as players:
        return dict(zip(SCENARIOS, players.map(play, SCENARIOS), strict=True))


@pytest.mark.parametrize("name", ENDING)
def test_waiting_ranks_raise_when_the_faulty_rank_cannot_come(outcomes: dict[str, Outcomes], name: str) -> None:
    for rank in OTHERS:
        report = outcomes[name][rank]
        assert report.startswith("Stuck: "), report
        assert re.search(SCENARIOS[name].end or "", report), report
        waits = r"waits? in collective \d+, (all-reduce|communication hook) of 40 float32"
        if name == "goes_on_after_an_exception":  # each has launched as many of its small buckets as it came to
            waits = r" Ranks? [0-2]( and [12]|-2)? waits?( in collective \d+, all-reduce of \d+ float32)?\.\n"
        assert re.search(waits, report), report
    # What a rank finds after another has raised and left would name that rank.
    assert len({outcomes[name][rank].partition("reports:")[0] for rank in OTHERS}) == 1, outcomes[name]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_waiting_rank_says_what_the_faulty_rank_does(outcomes: dict[str, Outcomes], name: str) -> None:
    """Gloo ends a process that receives more than it expects; then the survivors say it."""
    assert any(re.search(SCENARIOS[name].cause, text) for text in outcomes[name].values()), outcomes[name]


def test_a_slow_rank_is_waited_for(outcomes: dict[str, Outcomes]) -> None:
    assert all(report.startswith("went on") for report in outcomes["sleeps"].values())


def test_the_rank_with_an_extra_step_waits(outcomes: dict[str, Outcomes]) -> None:
    report = outcomes["makes_an_extra_step"][FAULTY]
    # The first of the others to leave ends the wait; the last one may still be there.
    assert re.search(
        r"Ranks? [02]( and 2)? (has|have) (dropped the module|left before all-reduce \d+ was done)", report
    ), report


# ---------------------------------------------------------------------- the table in docs/stuck.md


def test_a_diagnosis_counts_if_it_names_the_cause() -> None:
    reports = [(10.1, "All is well."), (20.2, "Rank 1 accumulates under no_sync")]
    waits = Played("Stuck: Rank 1 has dropped the module.", 61.0, reports)
    alone = partial(Timed, "accumulates_alone")
    assert timed("accumulates_alone", [waits, Played(ended_after_s=70.0)]) == alone(20.2, 61.0, 61.0)
    raised = [Played("Stuck: Rank 1 has exited", 1.5), Played("Stuck: Rank 1 has ended", 2.5)]
    assert timed("dies", raised) == Timed("dies", 1.5, 1.5, 2.5)
    assert timed("dies", [Played()]) == Timed("dies", None, None, None)
