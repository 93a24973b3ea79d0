"""The functions that pages of `docs` call for outputs of real runs. Cog fills them in, within some minutes:

python -m cogapp -r -P docs/guard.md docs/watch.md docs/slow_rank.md
"""

from __future__ import annotations

from minddp.platform.wording import table
from tests.tools.watchdog.bugs import BUGS, WAITS
from tests.tools.watchdog.harness import run_apart
from tests.tools.watchdog.test_guard import findings
from tests.tools.watchdog.test_late_ranks import DELAYS_MS, PLACES, WORLD_SIZES, Delay, Outcome, train
from tests.tools.watchdog.test_watch import said_of, said_of_a_wait


def reported(name: str) -> None:
    """Print rank 0's report of a bug in a training with minddp's wrapper on three ranks."""
    (text,), *_ = run_apart(3, findings, name)
    print(f"```text\n{text}\n```")


def found() -> None:
    """Print rank 0's report of each bug, and the seconds from its first step to the report."""
    said, _ = run_apart(2, said_of, [*BUGS])
    print("| bug | after | warning |\n|---|--:|---|")
    for name, (function, _) in BUGS.items():
        print(f"| {title_of(name, function.__doc__)} | {said[name].seconds[0]:.1f} s | {said[name][0]} |")


def explained() -> None:
    """The first line that is said of each wait, with the default `stuck_after_s`."""
    print("| wait | after | first line of the diagnosis |\n|---|--:|---|")
    for name, (function, _) in WAITS.items():
        said = run_apart(2, said_of_a_wait, name, 7.0, 4.0, group_timeout_s=30.0, grace_s=40.0)
        first = next(of_rank for of_rank in said if of_rank)
        line = first[0].splitlines()[0]
        print(f"| {title_of(name, function.__doc__)} | {first.seconds[0]:.1f} s | {line} |")


def title_of(name: str, description: str | None) -> str:
    return f"`{name}`" + (f": {description[0].lower()}{description[1:].rstrip('.')}" if description else "")


def played(place: str) -> None:
    """The findings of three ranks of which rank 2 is late by 40 ms."""
    outcome: Outcome = run_apart(3, train, Delay(2, place, 0.04), 62, 50)[0]
    print("```text", *(finding.text for finding in outcome.found), "```", sep="\n")


def matrix() -> None:
    """For each number of ranks and delay, how much of the delay of the last rank is found in each phase."""
    rows = [["ranks", "delay", *PLACES[:4]]]
    for world_size in WORLD_SIZES:
        for delay_ms in DELAYS_MS:
            delays = [Delay(world_size - 1, place, delay_ms / 1e3) for place in PLACES[:4]]
            outcomes = [run_apart(world_size, train, delay, 21, 10)[0] for delay in delays]
            shares = [f"{attributed(*pair):.0%}" for pair in zip(outcomes, delays, strict=True)]
            rows.append([str(world_size), f"{delay_ms} ms", *shares])
    print(f"```text\n{table(rows, '>>>>>>')}\n```")


def attributed(outcome: Outcome, delay: Delay) -> float:
    """The part of a delay that is reported for its rank and phase."""
    place = PLACES.index(delay.place)
    found = [late for late in outcome.late if late.rank == delay.rank]
    return sum(late.phases_ns[place] for late in found) / (1e9 * delay.seconds)
