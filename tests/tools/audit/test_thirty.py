"""What the audit says of thirty scripts: twenty with a fault, ten that are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks import RankPool
from tests.tools.audit import scripts

FAST = "bypassed_wrapper", "mean_of_means_accumulated", "some_parameters_left_out", "right_tokens", "right_clipped"


@pytest.mark.parametrize("name", FAST)
def test_a_script(ranks: Callable[[int], RankPool], name: str) -> None:
    outcome = ranks(2).run(scripts.run, name, 7)[0]
    assert outcome.is_right, outcome
    assert outcome.verdict.is_fault is not name.startswith("right")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 100])
def test_thirty_scripts(ranks: Callable[[int], RankPool], seed: int) -> None:
    """Weights right within 1% in all, the verdict in 19 of 20, and none against a script that is right."""
    faulty, right = [], []
    for number, name in enumerate(scripts.SCRIPTS):
        outcome = ranks(2 + number % 2).run(scripts.run, name, seed + number)[0]
        (right if name.startswith("right") else faulty).append(outcome)
    assert (len(faulty), len(right)) == (20, 10)
    assert max(outcome.error for outcome in (*faulty, *right)) < 0.01
    assert sum(outcome.verdict.is_fault and outcome.is_right for outcome in faulty) >= 19
    assert [outcome for outcome in right if outcome.verdict.is_fault or not outcome.is_right] == []
