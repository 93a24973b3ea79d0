"""Made-up steps of fleets: which rank is late, when, and by how much is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp.tools.watchdog.slow_rank import PHASES, LateRank, costs_ns, late_ranks

MS = 1_000_000
BUSY_MS = (1, 3, 5, 1, 0)  # of each rank in each phase
COMMUNICATES_MS = 2
Step = list[list[int]]  # of each rank, by phase and waiting


def step_of(busy_ms: list[list[float]], communicates_ms: float = COMMUNICATES_MS) -> Step:
    """All ranks end together, when the last one has been busy and its buckets have arrived."""
    end_ms = max(map(sum, busy_ms)) + communicates_ms
    return [[*(int(MS * ms) for ms in busy), int(MS * (end_ms - sum(busy)))] for busy in busy_ms]


def fleet(
    ranks: int,
    steps: int,
    delay_ms: Callable[[int, int, int], float] = lambda *_: 0,
    noise: float = 0.0,
    seed: int = 0,
) -> list[Step]:
    """Steps in which rank r needs `delay_ms(step, r, phase)` longer, and by noise up to that share longer."""
    draw = random.Random(seed).random
    return [
        step_of(
            [
                [ms * (1 + noise * draw()) + delay_ms(t, rank, phase) for phase, ms in enumerate(BUSY_MS)]
                for rank in range(ranks)
            ]
        )
        for t in range(steps)
    ]


def costs_ms(step: Step) -> list[float]:
    return (costs_ns(np.array([step]))[0] / MS).tolist()


# ---------------------------------------------------------------------- one step


@pytest.mark.parametrize(
    ("busy_ms", "expected_ms"), [([4, 9], [-5, 5]), ([5, 12, 5], [-3.5, 7, -3.5]), ([4, 5, 9, 5], [-1, 0, 4, 0])]
)
def test_a_cost_is_what_a_rank_is_busy_beyond_the_median_of_the_others(
    busy_ms: list[float], expected_ms: list[float]
) -> None:
    step = step_of([[0, 0, ms, 0, 0] for ms in busy_ms])
    assert costs_ms(step) == expected_ms


def test_a_rank_for_which_no_other_waits_costs_nothing() -> None:
    """It is busy for longer, but the others have met it before the end of backward, in a collective."""
    step = [[MS, MS, MS, MS, 0, 2 * MS], [MS, MS, MS, 9 * MS, 0, 2 * MS]]
    assert max(costs_ms(step)) == 0


# ---------------------------------------------------------------------- late in each step


@given(
    ranks=st.integers(2, 6),
    late=st.integers(0, 5),
    phase=st.integers(0, len(PHASES) - 1),
    delay_ms=st.integers(3, 300),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_a_delay_is_found_with_its_rank_and_phase(
    ranks: int, late: int, phase: int, delay_ms: int, seed: int
) -> None:
    late %= ranks
    steps = fleet(ranks, 20, lambda _, r, p: delay_ms * ((r, p) == (late, phase)), noise=0.2, seed=seed)
    (found,) = late_ranks(steps)
    assert (found.rank, found.phase) == (late, PHASES[phase])
    assert found.phases_ns[phase] == pytest.approx(delay_ms * MS, rel=0.2, abs=MS)
    assert found.late_ns == pytest.approx(delay_ms * MS, rel=0.2, abs=MS)
    assert found.share == pytest.approx(delay_ms / (sum(BUSY_MS) + COMMUNICATES_MS + delay_ms), abs=0.1)


def test_a_rank_that_makes_up_for_its_delay_is_not_late() -> None:
    delays = {(1, 0): 4, (1, 2): -4}
    assert late_ranks(fleet(3, 9, lambda _, r, p: delays.get((r, p), 0))) == []


def test_two_late_ranks_of_four_are_both_late_and_the_later_one_comes_first() -> None:
    found = late_ranks(fleet(5, 9, lambda _, r, p: (p == 1) * {1: 20, 3: 30}.get(r, 0)))
    assert [late.rank for late in found] == [3, 1]


def test_one_long_pause_changes_nothing_for_a_late_rank() -> None:
    steps = fleet(2, 100, lambda t, r, p: 5 * (r == 1 and p == 0) + 1000 * (r == 0 and t == 50))
    (found,) = late_ranks(steps)
    assert found.share == pytest.approx(5 / 17)


def test_a_rank_that_is_late_in_few_steps_is_not_reported() -> None:
    assert late_ranks(fleet(3, 100, lambda t, r, p: 30 * (t % 10 < 4 and r == 1 and p == 0))) == []


def test_costs_below_the_least_share_are_not_reported() -> None:
    (found,) = late_ranks(fleet(2, 9, lambda _, r, p: 2 * (r == 1 and p == 0)))  # 2 of 14 ms
    assert found.share == pytest.approx(2 / 14)
    assert late_ranks(fleet(2, 9, lambda _, r, p: 0.5 * (r == 1 and p == 0))) == []  # 0.5 of 12.5 ms


# ---------------------------------------------------------------------- not late


def test_steps_of_other_lengths_on_other_ranks_are_nobodys_fault() -> None:
    """Each step has a batch that takes long, by turns on each rank."""
    steps = fleet(4, 100, lambda t, r, p: 30 * (r == t % 4 and p == 2))
    assert late_ranks(steps) == []


@given(
    ranks=st.integers(2, 8),
    noise=st.floats(0, 3),
    pauses=st.floats(0, 0.2),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_an_even_fleet_is_late_in_no_two_windows(ranks: int, noise: float, pauses: float, seed: int) -> None:
    """Noise, and pauses of any rank in any step; what chance shows in one window it does not show in the next."""
    draw = random.Random(-seed)

    def pause(_t: int, _r: int, phase: int) -> float:
        return 20 * draw.random() * (phase == 2 and draw.random() < pauses)

    windows = [late_ranks(fleet(ranks, 100, pause, noise, seed + 10_000 * k)) for k in range(3)]
    assert not set.intersection(*({(late.rank, late.phase) for late in found} for found in windows))


# ---------------------------------------------------------------------- words


def test_a_sentence() -> None:
    late = LateRank(2, 18.31 * MS, (17.9 * MS, 0, 0.4 * MS, 0, 0), 0.314)
    assert str(late) == (
        "Rank 2 is late: 18.3 ms in each step, 17.9 ms of it between steps. The others wait for it: 31% of a step."
    )
