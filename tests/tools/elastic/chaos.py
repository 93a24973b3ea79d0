"""`python -m tests.tools.elastic.chaos`: kill ranks at random moments, and compare the bits at the end.

The kills come from outside, a random number of steps after each other, and some milliseconds: in a step, in a vote,
while ranks regroup after another loss. The rank is started again. The last one is spared: the state would be lost.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.tools.elastic.job import Job, digests
from tests.tools.elastic.survivor import undisturbed

PATIENCE_S = 120.0  # between two kills, for restarted ranks to come


@dataclass
class Report:
    """`losses`: when a rank was killed. Times are in seconds since the beginning."""

    num_steps: int = 0
    num_generations: int = 0
    duration_s: float = 0.0
    longest_gap_s: float = 0.0
    is_undisturbed: bool = False
    failures: list[int] = field(default_factory=list)  # exit codes other than that of a kill
    losses: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def table(self) -> str:
        rows = {
            "ranks killed": len(self.losses),
            "generations": self.num_generations,
            "steps": self.num_steps,
            "time": f"{self.duration_s:.0f} s",
            "longest time without a step": f"{self.longest_gap_s:.2f} s",
            "ranks that failed": len(self.failures),
            "same bits as undisturbed": "yes" if self.is_undisturbed else "NO",
        }
        return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def kill_at_random(
    num_kills: int, num_ranks: int, seed: int, transport: str = "auto", every_steps: float = 10.0
) -> Report:
    """One training of `num_ranks`, in whose last steps all kills have been made, `every_steps` on average."""
    rng = random.Random(seed)
    steps = int(num_kills * every_steps * 1.5) + 20
    hold = steps - 10  # the ranks wait there if they are too fast
    job = Job(num_ranks, restarts=num_kills, steps=steps, share_s=0.002, transport=transport, hold=hold)
    report, began = Report(), time.time()
    killed: set[Any] = set()
    due_step, deadline = 3.0, time.monotonic() + PATIENCE_S
    while len(report.losses) < num_kills:
        if not job.attend() or time.monotonic() > deadline:
            job.end()
            raise AssertionError(job.account()[-4000:])
        time.sleep(0.02)
        events = job.events()
        highest, at_work = job.highest_step(), members_at_work(events)
        victims = [each for each in job.alive() if each.pid in at_work and each not in killed]
        if highest >= min(due_step, hold - 1) and len(victims) > 1:
            time.sleep(rng.random() * 0.03)
            victim = rng.choice(victims)
            victim.kill()
            report.losses.append(time.time() - began)
            killed.add(victim)
            gap = 0.0 if rng.random() < 1 / 4 else rng.expovariate(1 / every_steps)
            due_step, deadline = highest + gap, time.monotonic() + PATIENCE_S
    Path(job.folder.name, "go").touch()
    report.events = job.wait()
    report.failures = job.failures()
    return judged(report, steps, began)


def members_at_work(events: list[dict[str, Any]]) -> set[int]:
    """The processes that have begun a step in the latest generation in which one has: they have the state."""
    begun = [event for event in events if event["event"] == "begin"]
    latest = max((event["generation"] for event in begun), default=0)
    return {event["pid"] for event in begun if event["generation"] == latest}


def judged(report: Report, steps: int, began: float) -> Report:
    for event in report.events:
        event["time"] -= began
    done = [event for event in report.events if event["event"] == "step"]
    report.num_steps = len({event["step"] for event in done})
    report.num_generations = max(event["generation"] for event in done)
    report.duration_s = done[-1]["time"]
    report.longest_gap_s = max(later["time"] - earlier["time"] for earlier, later in pairwise(done))
    each_once = len({(event["pid"], event["step"]) for event in done}) == len(done)
    found = set(digests(report.events))
    report.is_undisturbed = found == {undisturbed(steps)} and report.num_steps == steps and each_once
    return report


def draw(report: Report, path: str) -> None:
    """Steps over time, ranks at work, each loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [event for event in report.events if event["event"] == "step"]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 5), height_ratios=(2, 1))
    above.plot([event["time"] for event in done], [event["step"] for event in done], linewidth=1.5)
    above.set_ylabel("step")
    below.step([event["time"] for event in done], [event["world"] for event in done], where="post")
    below.set_ylabel("ranks")
    below.set_xlabel("s")
    below.set_ylim(0, max(event["world"] for event in done) + 0.5)
    for axis in (above, below):
        for time_s in report.losses:
            axis.axvline(time_s, color="tab:red", linewidth=0.6, alpha=0.7)
    above.set_title(
        f"{len(report.losses)} ranks killed (red); {report.num_steps} steps in {report.duration_s:.0f} s"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=10.0, help="steps between two losses, on average")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--picture", help="a file")
    parsed = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["RES_OPTIONS"] = "attempts:0"  # for the store's server, as minddp.tools.elastic.launcher
    report = kill_at_random(parsed.kills, parsed.ranks, parsed.seed, parsed.transport, every_steps=parsed.every)
    print(report.table())
    if parsed.picture:
        draw(report, parsed.picture)


if __name__ == "__main__":
    main()
