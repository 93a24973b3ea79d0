"""Real ranks of which one is late: it is named, with the phase and most of what the others wait."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from minddp.tools.forecast.lateness import PHASES
from minddp.tools.watchdog.slow_rank import WARM_UP_STEPS
from tests.tools.watchdog.late import PLACES, Delay, Outcome, train

WINDOW_STEPS = 7
DELAY_S = 0.1  # long beside the time for which other programs may take a core


def play(ranks, world_size: int, delay: Delay, **options: Any) -> list[Outcome]:
    steps = WARM_UP_STEPS + WINDOW_STEPS
    return ranks(world_size).run(partial(train, delay=delay, steps=steps, window_steps=WINDOW_STEPS, **options))


def assert_found(outcomes: list[Outcome], delay: Delay) -> None:
    """The late rank is the only finding, and at least 80% of its delay counts for the right phase.

    Other programs may delay it further. How much of which delay counts is tested in `test_lateness.py`.
    """
    phase = PHASES[PLACES.index(delay.place)].value
    assert [finding.subject for finding in outcomes[0].found] == [f"rank {delay.rank} {phase}"]
    (late,) = outcomes[0].late
    assert late.rank == delay.rank
    assert late.phase == phase
    assert delay.rank is not None
    assert late.phases_ns[PLACES.index(delay.place)] >= 0.8e9 * outcomes[delay.rank].slept_s


@pytest.mark.parametrize("place", PLACES)
def test_a_late_rank_is_named_with_its_phase(ranks, place: str) -> None:
    delay = Delay(1, place, DELAY_S)
    assert_found(play(ranks, 3, delay), delay)


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "process_group"},
        {"find_unused_parameters": True},  # whose exchange is waited for as well
        {"gradient_as_bucket_view": True, "forward_sync_buffers": False},
    ],
    ids=str,
)
def test_with_other_options(ranks, options: dict[str, Any]) -> None:
    delay = Delay(1, "backward", DELAY_S)
    assert_found(play(ranks, 2, delay, **options), delay)


def test_the_wait_for_the_buffers_of_rank_0_is_for_rank_0(ranks) -> None:
    """The others meet it before the forward, so no rank waits for it at the end of backward."""
    delay = Delay(0, "between", DELAY_S)
    assert_found(play(ranks, 3, delay), delay)


def test_an_even_fleet_is_silent(ranks) -> None:
    """Also beside other programs, which may take a core from one rank for a while, but not from the same always."""
    delay = Delay(None, "forward", 0.06)
    outcomes = ranks(3).run(partial(train, delay=delay, steps=60, window_steps=60 - WARM_UP_STEPS))
    assert outcomes[0].found == []
