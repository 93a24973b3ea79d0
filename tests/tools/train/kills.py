"""A run one of whose ranks is killed at random moments, and started again.

python -m tests.tools.train.kills --kills 50 --out /tmp/kills   compares its bits with those of a run left alone
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minddp.tools.train.settings import Settings
from tests.tools.train.runs import assert_same_bits, children_of, command_line, final_bits, records, tiny

LIMIT_S = 300.0  # until the ranks are there, have got further, or have ended
STEPS_BETWEEN = 12  # at most, from a start of the ranks to its kill


@dataclass(frozen=True)
class Killed:
    """How it went: steps at which the ranks have started, and how many kills there were."""

    settings: Settings
    kills: int
    starts: list[int]
    seconds: float


class RunIsOver(Exception):
    """It was quicker than the kills."""


def kill_at_random(folder: Path, num_kills: int, seed: int) -> Killed:
    """Train with restarts, and kill a rank of each start but the last: half of them by the clock, while they start.

    The others are killed a few steps later, so the run gets further.
    """
    chance = random.Random(seed)
    steps = 2 * STEPS_BETWEEN * num_kills
    settings = tiny(
        folder / "killed", steps=steps, checkpoint_every=5, max_restarts=num_kills, validate_every=10**6
    )
    began, seen = time.monotonic(), set[int]()
    process = subprocess.Popen([sys.executable, "-m", "minddp", "train", *command_line(settings)])
    kills = 0
    try:
        while kills < num_kills:
            ranks = new_ranks(process, seen)
            if chance.random() < 0.5:
                at = time.monotonic() + chance.uniform(0.0, 5.0)
                wait_until(process, lambda at=at, kills=kills: is_due(settings.folder, kills, at))
            else:
                more = chance.randrange(STEPS_BETWEEN)
                wait_until(process, lambda kills=kills, more=more: has_got_further(settings.folder, kills, more))
                time.sleep(chance.uniform(0.0, 0.02))
            os.kill(chance.choice(ranks), signal.SIGKILL)
            kills += 1
            seen |= set(ranks)
        status = process.wait(LIMIT_S)
    except (RunIsOver, ProcessLookupError):
        status = process.wait(LIMIT_S)
    finally:
        process.terminate()  # the launcher ends its ranks, too
        process.wait(LIMIT_S)
    assert status == 0, status
    return Killed(
        settings, kills, [event["step"] for event in records(settings.folder, "start")], time.monotonic() - began
    )


def is_due(folder: Path, restarts: int, at: float) -> bool:
    """True at that time, or earlier if the ranks start so fast that the run would soon be over."""
    return time.monotonic() >= at or has_got_further(folder, restarts, STEPS_BETWEEN)


def has_got_further(folder: Path, restarts: int, steps: int) -> bool:
    """True if the ranks of that restart have taken so many steps."""
    begun = [event["step"] for event in records(folder, "start") if event["restarts"] == restarts]
    return bool(begun) and max([r["step"] for r in records(folder, "training")], default=0) >= begun[0] + steps


def new_ranks(launcher: subprocess.Popen[bytes], seen: set[int]) -> list[int]:
    """The two ranks that have been started last."""
    found: list[int] = []

    def are_there() -> bool:
        found[:] = [pid for pid in children_of(launcher) if pid not in seen]
        return len(found) == 2

    wait_until(launcher, are_there)
    return found


def wait_until(launcher: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if launcher.poll() is not None:
            raise RunIsOver
        assert time.monotonic() < deadline, "the ranks are not started again"
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = kill_at_random(options.out, options.kills, options.seed)
    whole = dataclasses.replace(found.settings, out=options.out / "whole", max_restarts=0)
    subprocess.run([sys.executable, "-m", "minddp", "train", *command_line(whole)], check=True)
    assert_same_bits(final_bits(found.settings.folder), final_bits(whole.folder))
    assert records(found.settings.folder, "training") == records(whole.folder, "training")
    print(f"{found.kills} kills in {found.seconds:.0f} s, the same bits. Ranks began at steps {found.starts}.")


if __name__ == "__main__":
    main()
