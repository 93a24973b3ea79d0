"""A rank that makes the others wait.

Each rank measures, by the clock of its host, how long each phase of the sampled steps takes and how long it waits;
rank 0 compares windows of steps. On an accelerator that clock shows when kernels are launched, not when they run,
so the check is off there.

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

from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch

from minddp.tools.watchdog.check import Check, Finding, Notes, is_sampled

WARM_UP_STEPS = 10  # memory is allocated, code compiled, buckets are rebuilt
LEAST_LATE_NS = 1_000_000  # a shorter delay is scheduling noise
MOST_KEPT = 4096  # steps: of notes that are not read in time the latest, of a window the first
# The places in a rank's times of its phases, and of its waits for other ranks. No enum: hashing it takes longer.
BETWEEN, FORWARD, BACKWARD, OPTIMIZER, ACCUMULATION, WAITS = range(6)
#: The phases, as sentences name them.
PHASES = (
    "between steps",
    "in forward",
    "in backward",
    "in the optimizer",  # and between backward and the optimizer
    "while it accumulates (no_sync)",  # from the end of such a forward to the next one
)
# Rank 0 compares windows of at least so many sampled steps and seconds: threads share a core for some ten seconds.
WINDOW_STEPS = 20
WINDOW_S = 90.0
# A rank that costs this share of a step is a hint in the first window already, after so many seconds.
HINT_SHARE, HINT_S = 0.3, 10.0
LEAST_SHARE = 0.05  # of a step: smaller costs are not mentioned
IN_EACH_STEP, ALIKE = 0.75, 0.25  # this share of a rank's steps cost at least this share of its median step


class SlowRank(Check):
    """Measures the phases of steps, and compares those of all ranks."""

    def __init__(self) -> None:
        # Of this rank: what it measures.
        self._noted: deque[tuple[int, list[int]]] = deque(maxlen=MOST_KEPT)
        self._phase = BETWEEN
        self._reset()
        self._since_ns = perf_counter_ns()
        # Of rank 0: the steps of this window, and its beginning.
        self._window: list[Sequence[Sequence[int]]] = []
        self._first_step = self._began_ns = 0
        self._hints = True  # once

    def _reset(self) -> None:
        self._times = [0] * (len(PHASES) + 1)
        self._step: int | None = None
        self._is_computed = False

    def pre_forward(self) -> None:
        if self._phase == BACKWARD:  # the last forward had none
            self._phase = BETWEEN
        self._turn_to(WAITS)

    def before_module(self, step: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._turn_to(FORWARD)

    def post_forward(self, synchronises: bool) -> None:
        self._turn_to(BACKWARD if synchronises else ACCUMULATION)

    def first_gradient(self, step: int) -> None:
        self._step = step if is_sampled(step) else None

    def before_unpack(self) -> None:
        self._turn_to(WAITS)
        self._is_computed = True

    def post_backward(self) -> None:
        self._turn_to(BETWEEN)
        if self._is_computed and self._step is not None:
            self._noted.append((self._step, self._times))
        self._reset()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._turn_to(OPTIMIZER)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._turn_to(BETWEEN)

    def _turn_to(self, phase: int) -> None:
        now_ns = perf_counter_ns()
        self._times[self._phase] += now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns

    def take_notes(self, is_last: bool = False) -> Notes:
        return [self._noted.popleft() for _ in range(len(self._noted))]

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        """Step `number` of all ranks."""
        if number < WARM_UP_STEPS:
            return
        now_ns = perf_counter_ns()
        if not self._window:
            self._began_ns, self._first_step = now_ns, number
        if len(self._window) < MOST_KEPT:
            self._window.append(notes)
        window_s = (now_ns - self._began_ns) / 1e9
        is_full = window_s >= WINDOW_S
        if len(self._window) < WINDOW_STEPS or not (is_full or (self._hints and window_s >= HINT_S)):
            return
        steps, least_share = self._window, 0.0 if is_full else HINT_SHARE
        self._window, self._hints = [] if is_full else steps, False
        for late in late_ranks(steps):
            if late.late_ns >= LEAST_LATE_NS and late.share >= least_share:
                text = (
                    f"{late} Measured in steps {self._first_step} to {number}. Compare its data loading, its work "
                    f"and its machine with the others'; `minddp xray` shows a step."
                )
                subject = f"rank {late.rank} {late.phase}"
                yield Finding("slow_rank", subject, number, (late.rank,), text)


# ---------------------------------------------------------------------- the judgement, on durations


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


def late_ranks(steps: Sequence[Sequence[Sequence[float]]]) -> list[LateRank]:
    """The ranks that cost the others more than `LEAST_SHARE` of a step, the costliest first.

    `steps[t][r]` are the times of rank r in step t, by phase and waiting; one step and two ranks at least.
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
