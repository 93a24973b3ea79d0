"""The judgement which rank makes the others wait, and in which phase of a step. Pure arithmetic on durations.

[Note: late ranks]
All ranks are together when a synchronised backward ends. A step counts from the end of one to the end of the next,
and takes equally long on all ranks: each is busy in the phases and waits for the rest of the time. The rank that is
busy longest waits least, for communication alone; the others wait longer, and the difference is their wait for it.

In one step, the cost of a rank is the time for which it is busy longer than the median of the others, but at most
the time for which they wait longer than it: if a rank is slow after all have met again, as in collectives of the
script, no rank waits at the end of backward. A rank that waits for others has a negative cost.

In a fleet of equal ranks each step has another slowest rank. So a rank is late if its median step has a cost and
three quarters of its steps have a good part of that.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class WorkPhase(enum.Enum):
    """The phases in which a rank is busy, as sentences name them."""

    BETWEEN = "between steps"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    OPTIMIZER = "in the optimizer"  # and between backward and the optimizer
    ACCUMULATION = "while it accumulates (no_sync)"


class RankTimes(NamedTuple):
    """One rank's time from the end of a synchronised backward to the end of the next: busy in phases, or waiting.

    `backward_ns`: from the end of forward until the gradients are computed. `accumulation_ns`: from the end of a
    forward that is not synchronised (`no_sync`) to the next forward. `between_ns`: all other work, such as loading
    data. `waited_ns`: for buckets at the end of backward, and for buffers before a forward.
    """

    between_ns: int
    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    accumulation_ns: int
    waited_ns: int

    @property
    def busy_ns(self) -> int:
        return sum(self) - self.waited_ns


#: The phases of `RankTimes`, in its order.
PHASES = tuple(WorkPhase)

LEAST_SHARE = 0.05  # of a step: smaller costs are not mentioned
IN_EACH_STEP, ALIKE = 0.75, 0.25  # this share of a rank's steps cost at least this share of its median step


class LateRank(NamedTuple):
    """A rank for which the others wait in each step.

    The median step costs `late_ns`, a `share` of it. `phases_ns[p]` of that arises in `PHASES[p]`.
    """

    rank: int
    late_ns: float
    phases_ns: tuple[float, ...]
    share: float

    @property
    def phase(self) -> str:
        """The phase that contributes most."""
        return PHASES[self.phases_ns.index(max(self.phases_ns))].value

    def __str__(self) -> str:
        late, most = f"{self.late_ns / 1e6:.1f} ms", f"{max(self.phases_ns) / 1e6:.1f} ms"
        return (
            f"Rank {self.rank} is late: {late} in each step, {most} of it {self.phase}; the others wait for it, "
            f"{self.share:.0%} of a step."
        )


def late_ranks(steps: Sequence[Sequence[RankTimes]], least_share: float = LEAST_SHARE) -> list[LateRank]:
    """The ranks that cost the others more than this share of a step, the costliest first.

    `steps[t][r]` are the times of rank r in step t; one step and two ranks at least.
    """
    step_ns = median(sum(times) for step in steps for times in step)
    found = []
    for rank, costs in enumerate(zip(*map(costs_ns, steps), strict=True)):
        late_ns = median(costs)
        num_late = sum(cost > max(0.0, ALIKE * late_ns) for cost in costs)
        if num_late >= IN_EACH_STEP * len(steps) and late_ns > least_share * step_ns:
            found.append(LateRank(rank, late_ns, _phases_ns(steps, rank, late_ns), late_ns / step_ns))
    return sorted(found, key=lambda late: -late.share)


def _phases_ns(steps: Sequence[Sequence[RankTimes]], rank: int, late_ns: float) -> tuple[float, ...]:
    """The part of its lateness that arises in each phase; a rank may be quicker than the others in some."""
    longer = [
        median(_beyond_others([times[phase] for times in step])[rank] for step in steps)
        for phase in range(len(PHASES))
    ]
    return tuple(min(late_ns, max(0.0, ns)) for ns in longer)


def costs_ns(step: Sequence[RankTimes]) -> list[float]:
    """The time for which the others wait for each rank in one step; negative if it waits."""
    busy = _beyond_others([times.busy_ns for times in step])
    waited = _beyond_others([times.waited_ns for times in step])
    return [min(longer, -more) for longer, more in zip(busy, waited, strict=True)]


def _beyond_others(values: Sequence[float]) -> list[float]:
    """Each value minus the median of the other ones."""
    order = sorted(values)
    middle = (len(order) - 2) // 2, (len(order) - 1) // 2  # of the others
    places = [bisect_left(order, value) for value in values]
    return [order[at] - sum(order[k + (k >= at)] for k in middle) / 2 for at in places]
