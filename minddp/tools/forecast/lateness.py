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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


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


#: The phases in which a rank is busy, as sentences name them, in the order of `RankTimes`.
PHASES = (
    "between steps",
    "in forward",
    "in backward",
    "in the optimizer",  # and between backward and the optimizer
    "while it accumulates (no_sync)",
)

LEAST_SHARE = 0.05  # of a step: smaller costs are not mentioned
IN_EACH_STEP, ALIKE = 0.75, 0.25  # this share of a rank's steps cost at least this share of its median step


class LateRank(NamedTuple):
    """The others wait `late_ns` for it, a `share` of the median step; `phases_ns[p]` of it arise in `PHASES[p]`."""

    rank: int
    late_ns: float
    phases_ns: tuple[float, ...]
    share: float

    @property
    def phase(self) -> str:
        """The phase that contributes most."""
        return PHASES[self.phases_ns.index(max(self.phases_ns))]

    def __str__(self) -> str:
        late, most = f"{self.late_ns / 1e6:.1f} ms", f"{max(self.phases_ns) / 1e6:.1f} ms"
        return (
            f"Rank {self.rank} is late: {late} in each step, {most} of it {self.phase}. The others wait for it: "
            f"{self.share:.0%} of a step."
        )


def late_ranks(steps: Sequence[Sequence[RankTimes]]) -> list[LateRank]:
    """The ranks that cost the others more than `LEAST_SHARE` of a step, the costliest first.

    `steps[t][r]` are the times of rank r in step t; one step and two ranks at least.
    """
    times = np.array(steps, dtype=float)  # [steps, ranks, phases and waiting]
    costs = costs_ns(times)
    late_ns = np.median(costs, axis=0)
    shares = late_ns / np.median(times.sum(axis=2))
    in_each_step = np.mean(costs > np.maximum(0.0, ALIKE * late_ns), axis=0) >= IN_EACH_STEP
    phases_ns = np.median(_beyond_others(times[..., :-1]), axis=0)  # negative where a rank is quicker
    found = [
        LateRank(rank, late_ns[rank], tuple(phases_ns[rank].clip(0.0, late_ns[rank])), shares[rank])
        for rank in np.flatnonzero(in_each_step & (shares > LEAST_SHARE)).tolist()
    ]
    return sorted(found, key=lambda late: -late.share)


def costs_ns(times: np.ndarray) -> np.ndarray:
    """The time for which the others wait for each rank in each step, `[steps, ranks]`; negative if it waits."""
    return np.minimum(_beyond_others(times[..., :-1].sum(axis=2)), -_beyond_others(times[..., -1]))


def _beyond_others(values: np.ndarray) -> np.ndarray:
    """Each value minus the median of the other ranks', `[steps, ranks, ...]`."""
    order, ranks = np.sort(values, axis=1), values.shape[1]
    middle = (ranks - 2) // 2, (ranks - 1) // 2  # of the others
    others = [np.where(values <= order[:, [k]], order[:, [k + 1]], order[:, [k]]) for k in middle]
    return values - sum(others) / 2
