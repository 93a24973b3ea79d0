"""How long it takes, at default settings, until a stuck job says why. Some two minutes:

    python -m tests.tools.watchdog.time_to_diagnosis

All scenarios of `stuck.py` are played at once, each by three ranks of its own, over the default transport. Time is
counted from the step in which rank 1 misbehaves.
"""

from __future__ import annotations

import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import minddp
from minddp.platform import wording
from tests.ranks import RankFailure
from tests.tools.watchdog.harness import run_apart
from tests.tools.watchdog.stuck import SCENARIOS, Played, played


def play(name: str) -> dict[int, str]:
    """The final report of each rank, or how it ended."""
    try:
        return {rank: str(ended) for rank, ended in enumerate(run_apart(3, played, name, timeout_s=90, grace_s=60))}
    except RankFailure as failure:
        return {**failure.reports, **{rank: str(ended) for rank, ended in failure.results.items()}}


class Timed(NamedTuple):
    """Seconds until a rank names the cause, and until the first and the last rank raise; `None` if never."""

    scenario: str
    named_s: float | None
    first_raised_s: float | None
    last_raised_s: float | None


def default_limit_s() -> float:
    default = inspect.signature(minddp.DistributedDataParallel).parameters["stuck_after_s"].default
    assert isinstance(default, float)
    return default


def time(scenario: str) -> Timed:
    limits = {"timeout_s": 200, "group_timeout_s": 120, "grace_s": 120}
    try:
        return timed(scenario, run_apart(3, played, scenario, default_limit_s(), **limits))
    except RankFailure as failure:
        return timed(scenario, list(failure.results.values()))


def timed(scenario: str, results: list[Played]) -> Timed:
    diagnoses = [diagnosis for result in results for diagnosis in result.diagnoses()]
    named = [seconds for seconds, text in diagnoses if re.search(SCENARIOS[scenario].cause, text)]
    raised = [result.ended_after_s for result in results if result.ended.startswith("Stuck: ")]
    return Timed(scenario, min(named, default=None), min(raised, default=None), max(raised, default=None))


def table(rows: list[Timed]) -> str:
    """In Markdown."""
    lines = ["| scenario | the cause is named after | ranks raise after |", "|---|--:|--:|"]
    for row in rows:
        raised = [f"{seconds:.1f} s" for seconds in (row.first_raised_s, row.last_raised_s) if seconds is not None]
        raises = " to ".join(dict.fromkeys(raised)) or "go on"
        lines.append(
            f"| `{row.scenario}` | {'never' if row.named_s is None else f'{row.named_s:.1f} s'} | {raises} |"
        )
    within = sum(row.named_s is not None and row.named_s <= 20 for row in rows)
    return "\n".join([*lines, "", f"Within 20 s: {within} of {wording.count(len(rows), 'scenario')}."])


def main() -> None:
    with ThreadPoolExecutor(len(SCENARIOS)) as players:
        print(table(list(players.map(time, SCENARIOS))))


if __name__ == "__main__":
    main()
