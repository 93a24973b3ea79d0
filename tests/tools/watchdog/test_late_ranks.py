"""Real ranks of which one is late: it is named, with the phase and most of what the others wait."""

from __future__ import annotations

import re
from typing import Any

import pytest

from docs.learning.quotes import blocks
from minddp.tools.forecast.lateness import PHASES
from minddp.tools.watchdog.slow_rank import WARM_UP_STEPS
from tests.tools.watchdog.harness import DOCS
from tests.tools.watchdog.late import PLACES, Delay, Outcome, train
from tests.tools.watchdog.pages import DELAYS_MS, WORLD_SIZES

WINDOW_STEPS = 7
DELAY_S = 0.1  # long beside the time for which other programs may take a core


@pytest.mark.parametrize(
    ("world_size", "rank", "place", "options"),
    [
        *((3, 1, place, {}) for place in PLACES),
        (
            3,
            0,
            "between",
            {},
        ),  # the others wait for its buffers before the forward, and none at the end of backward
        (2, 1, "backward", {"transport": "process_group"}),
        (2, 1, "backward", {"find_unused_parameters": True}),  # whose exchange is waited for as well
        (2, 1, "backward", {"gradient_as_bucket_view": True, "forward_sync_buffers": False}),
    ],
)
def test_a_late_rank_is_named_with_its_phase(
    ranks: Any, world_size: int, rank: int, place: str, options: dict[str, Any]
) -> None:
    """It is the only finding, and at least 80% of its delay counts for the right phase.

    Other programs may delay it further. How much of which delay counts is tested in `test_lateness.py`.
    """
    delay = Delay(rank, place, DELAY_S)
    outcomes: list[Outcome] = ranks(world_size).run(
        train, delay, WARM_UP_STEPS + WINDOW_STEPS, WINDOW_STEPS, options
    )
    phase = PHASES[PLACES.index(place)].value
    assert [finding.subject for finding in outcomes[0].found] == [f"rank {rank} {phase}"]
    (late,) = outcomes[0].late
    assert (late.rank, late.phase) == (rank, phase)
    assert late.phases_ns[PLACES.index(place)] >= 0.8e9 * outcomes[rank].slept_s


def test_an_even_fleet_is_silent(ranks: Any) -> None:
    """Also beside other programs, which may take a core from one rank for a while, but not from the same always."""
    outcomes = ranks(3).run(train, Delay(None, "forward", 0.06), 60, 60 - WARM_UP_STEPS)
    assert outcomes[0].found == []


# ------------------------------------------------------------------ docs/slow_rank.md

SHOWN = blocks((DOCS / "slow_rank.md").read_text())


def test_the_sentence_on_the_page_names_the_late_rank() -> None:
    pattern = r"```text\nRank 2 is late: 4\d\.\d ms in each step, 4\d\.\d ms of it between steps\. .*\n```\n"
    assert re.fullmatch(pattern, SHOWN['played("between")'])


def test_at_least_80_percent_of_each_delay_on_the_page_is_found() -> None:
    rows = [line.split() for line in SHOWN["matrix()"].splitlines()[2:-1]]
    assert [(int(row[0]), int(row[1])) for row in rows] == [(n, ms) for n in WORLD_SIZES for ms in DELAYS_MS]
    for row in rows:
        assert len(row) == 3 + 4
        assert all(80 <= int(cell.removesuffix("%")) <= 120 for cell in row[3:]), row
