"""What docs/slow_rank.md shows of real runs. Cog fills it in, within some minutes:

python -m cogapp -r -P docs/slow_rank.md
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from minddp.platform.wording import table
from tests.ranks import RankPool
from tests.tools.watchdog.late import PLACES, Delay, Outcome, train

PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "slow_rank.md"
WORLD_SIZES, DELAYS_MS = (2, 3, 4), (20, 60, 200)


def play(world_size: int, delay: Delay, steps: int, window_steps: int) -> Outcome:
    """What rank 0 has seen."""
    pool = RankPool(world_size)
    try:
        return pool.run(partial(train, delay=delay, steps=steps, window_steps=window_steps))[0]
    finally:
        pool.kill()


def attributed(outcome: Outcome, delay: Delay) -> float:
    """The part of a delay that is reported for its rank and phase."""
    place = PLACES.index(delay.place)
    found = [late for late in outcome.late if late.rank == delay.rank]
    return sum(late.phases_ns[place] for late in found) / (1e9 * delay.seconds)


# ------------------------------------------------------------------ called by the page


def played(place: str) -> None:
    """The findings of three ranks of which rank 2 is late by 40 ms."""
    outcome = play(3, Delay(2, place, 0.04), steps=62, window_steps=50)
    print("```text", *(finding.text for finding in outcome.found), "```", sep="\n")


def matrix() -> None:
    """For each number of ranks and delay, how much of the delay of the last rank is found in each phase."""
    rows = [["ranks", "delay", *PLACES[:4]]]
    for world_size in WORLD_SIZES:
        for delay_ms in DELAYS_MS:
            delays = [Delay(world_size - 1, place, delay_ms / 1e3) for place in PLACES[:4]]
            outcomes = [play(world_size, delay, steps=21, window_steps=10) for delay in delays]
            shares = [f"{attributed(*pair):.0%}" for pair in zip(outcomes, delays, strict=True)]
            rows.append([str(world_size), f"{delay_ms} ms", *shares])
    print(f"```text\n{table(rows, '>>>>>>')}\n```")
