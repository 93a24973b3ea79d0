"""Jobs that really get stuck: what the waiting ranks report, and when they raise.

All scenarios of `stuck.py` are played at once, each by three ranks of its own: they mostly sleep.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ranks import RankFailure, RankPool
from tests.tools.watchdog.stuck import FAULTY, SCENARIOS, played

OTHERS = (0, 2)
pytestmark = pytest.mark.timeout(300)  # of the fixture, in which 33 processes begin at once
Outcomes = Mapping[int, str]


def play(name: str) -> Outcomes:
    """The final report of each rank, or how it ended."""
    pool = RankPool(3, grace_s=60)
    try:
        return {rank: str(ended) for rank, ended in enumerate(pool.run(played, name, timeout_s=90))}
    except RankFailure as failure:
        return {**failure.reports, **{rank: str(ended) for rank, ended in failure.results.items()}}
    finally:
        pool.kill()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcomes]:
    with ThreadPoolExecutor(len(SCENARIOS)) as players:
        return dict(zip(SCENARIOS, players.map(play, SCENARIOS), strict=True))


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("dies", r"Rank 1 has exited; its own output says why\."),
        ("data_ends_early", r"Rank 1 has exited"),
        ("raises_in_backward", r"Rank 1 has dropped the module"),
        ("accumulates_alone", r"Rank 1 has dropped the module"),
        ("skips_a_step", r"Rank 1 has dropped the module"),
        ("forgets_to_communicate", r"Rank 1 has dropped the module"),
        ("branch_on_one_rank", r"Rank 1 has dropped the module"),
        (
            "goes_on_after_an_exception",
            r"ended backward 3 on rank 1 before the gradients of `encoder\.weight`, `encoder\.bias` had arrived\. "
            r"Its script has caught the exception and goes on, stuck\.py:\d+ in step, "
            r"but (rank 0 has|rank 2 has|ranks 0 and 2 have) launched further",  # so far, when they were asked
        ),
    ],
)
def test_waiting_ranks_raise_when_the_faulty_rank_cannot_come(
    outcomes: dict[str, Outcomes], name: str, pattern: str
) -> None:
    for rank in OTHERS:
        report = outcomes[name][rank]
        assert report.startswith("Stuck: "), report
        assert re.search(pattern, report), report
        waits = r"waits? in collective \d+, (all-reduce|communication hook) of 40 float32"
        if name == "goes_on_after_an_exception":  # each has launched as many of its small buckets as it came to
            waits = r" Ranks? [0-2]( and [12]|-2)? waits?( in collective \d+, all-reduce of \d+ float32)?\.\n"
        assert re.search(waits, report), report
    # What a rank finds after another has raised and left would name that rank.
    assert len({outcomes[name][rank].partition("reports:")[0] for rank in OTHERS}) == 1, outcomes[name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sleeps", "Rank 1 is between backwards, at backward 2 of 3, stuck.py:"),
        (
            "branch_on_one_rank",
            "Rank 1 has not produced gradients for `decoder.weight`, `decoder.bias`: ",
        ),
        ("raises_in_backward", "Rank 1 is between forward and backward"),
        ("accumulates_alone", "Rank 1 accumulates under no_sync"),
        ("skips_a_step", "Rank 1 is between backwards, at backward 4 of 5"),
    ],
)
def test_one_waiting_rank_reports_where_the_faulty_rank_is(
    outcomes: dict[str, Outcomes], name: str, words: str
) -> None:
    reports = [outcomes[name][rank].partition("reports:")[2] for rank in OTHERS]
    assert any(words in text for text in reports), outcomes[name]


def test_a_slow_rank_is_waited_for(outcomes: dict[str, Outcomes]) -> None:
    assert all(report.startswith("went on") for report in outcomes["sleeps"].values())


def test_the_rank_with_an_extra_step_waits(outcomes: dict[str, Outcomes]) -> None:
    report = outcomes["makes_an_extra_step"][FAULTY]
    # The first of the others to leave ends the wait; the last one may still be there.
    assert re.search(
        r"Ranks? [02]( and 2)? (has|have) (dropped the module|left before all-reduce \d+ was done)", report
    ), report


def test_another_model_is_found_by_its_collectives(outcomes: dict[str, Outcomes]) -> None:
    """Gloo ends a process that receives more than it expects; the survivors report why."""
    report = " ".join(outcomes["has_another_model"].values())
    assert re.search(r"launched all-reduce of 45 float32", report), report
    assert "The ranks differ in model, options or control flow." in report
