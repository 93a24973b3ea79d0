"""A rank that makes the others wait.

Each rank measures how long it is busy in each phase of the steps that are looked at and how long it waits, by the
clock of the host; rank 0 compares windows of steps. See [Note: late ranks] in `tools/forecast/lateness.py`. On an
accelerator that clock shows when kernels are launched and not when they run, so there the check is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from minddp.tools.forecast.lateness import LateRank, RankTimes, late_ranks
from minddp.tools.watchdog.check import Check, Finding, Notes

WARM_UP_STEPS = 10  # memory is allocated, code compiled, buckets are rebuilt
LEAST_LATE_NS = 1_000_000  # a shorter delay is one of scheduling
MOST_KEPT = 1024  # steps; older ones are dropped if notes are not read in time

# What the thread that trains does: indices of `RankTimes`.
BETWEEN, FORWARD, BACKWARD, OPTIMIZER, ACCUMULATION, WAITED = range(6)


class Window(NamedTuple):
    """The steps that rank 0 compares: `steps` that were looked at, or fewer within `most_s`, and then a pause.

    A rank is reported if it is late in the same phase in at least `in_a_row` windows for `lasts_s`, or thrice as
    long if it is late in some steps only: a core is shared by several threads for some ten seconds at a time.
    """

    steps: int = 100
    most_s: float = 10.0
    least_steps: int = 20
    pause_s: float = 12.0
    in_a_row: int = 2
    lasts_s: float = 90.0

    def is_full(self, num_steps: int, length_s: float) -> bool:
        return num_steps >= self.steps or (num_steps >= self.least_steps and length_s >= self.most_s)


class SlowRank(Check):
    """Measures the phases of steps, and compares those of all ranks.

    Of rank 0's latest window, `waited_ns` is how long a rank waits in a step, in the mean, and `late` for which.
    """

    def __init__(self) -> None:
        self.waited_ns: float | None = None
        self.late: list[LateRank] = []
        self.window = Window()
        self._noted: deque[tuple[int, list[int]]] = deque(maxlen=MOST_KEPT)
        self._around_optimizer = BETWEEN
        self._compared: list[list[RankTimes]] = []  # the steps of this window
        self._began_ns = 0  # the window; before that time steps are ignored
        self._first_step = 0  # of the window
        self._late_since: dict[tuple[int, str, bool], list[int]] = {}  # when each window in a row began
        self._doing = BETWEEN
        self._reset()
        self._since_ns = perf_counter_ns()

    def _reset(self) -> None:
        self._times = [0] * len(RankTimes._fields)
        self._step: int | None = None
        self._is_computed = False

    def step_begins(self) -> None:
        self._turn_to(BETWEEN)
        self._reset()

    def forward_begins(self) -> None:
        if self._doing == BACKWARD:  # which was not called for the last forward
            self._doing = BETWEEN
        self._turn_to(WAITED)

    def before_forward(self, step: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._turn_to(FORWARD)

    def after_forward(self, synchronises: bool) -> None:
        self._turn_to(BACKWARD if synchronises else ACCUMULATION)

    def backward_begins(self, step: int, optimizer_steps: int) -> None:
        self._step = step

    def backward_computed(self) -> None:
        self._turn_to(WAITED)
        self._is_computed = True

    def backward_over(self) -> None:
        self._turn_to(BETWEEN)
        if self._is_computed and self._step is not None:
            self._noted.append((self._step, self._times))
        self._reset()

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self._doing != OPTIMIZER:  # a subclass calls its superclass within
            self._around_optimizer = self._doing
        self._turn_to(OPTIMIZER)

    def optimizer_over(self, optimizer: torch.optim.Optimizer) -> None:
        self._turn_to(self._around_optimizer)

    def _turn_to(self, doing: int) -> None:
        now_ns = perf_counter_ns()
        self._times[self._doing] += now_ns - self._since_ns
        self._doing, self._since_ns = doing, now_ns

    def take_notes(self, is_last: bool = False) -> Notes:
        return [self._noted.popleft() for _ in range(len(self._noted))]

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        """Step `number` of all ranks."""
        now_ns = perf_counter_ns()
        if number < WARM_UP_STEPS or now_ns < self._began_ns:
            return
        if not self._compared:
            self._began_ns, self._first_step = now_ns, number
        self._compared.append([RankTimes(*times) for times in notes])
        if not self.window.is_full(len(self._compared), 1e-9 * (now_ns - self._began_ns)):
            return
        known, self._late_since, late = self._late_since, {}, []
        for one in [one for one in late_ranks(self._compared) if one.late_ns >= LEAST_LATE_NS]:
            kind = one.rank, one.phase, one.in_steps == 1
            began_ns = self._late_since[kind] = [*known.get(kind, ()), self._began_ns]
            lasts_s = self.window.lasts_s * (1 if one.in_steps == 1 else 3)
            if len(began_ns) >= self.window.in_a_row and now_ns - began_ns[0] >= 1e9 * lasts_s:
                late.append(one)
        self.late = late
        self.waited_ns = fmean(times.waited_ns for step in self._compared for times in step)
        self._compared = []
        self._began_ns = now_ns + int(1e9 * self.window.pause_s)
        for one in late:
            text = (
                f"{one} Measured in steps {self._first_step} to {number}. Compare its work and its machine with "
                f"the others'; `minddp xray` shows a step."
            )
            yield Finding("slow_rank", f"rank {one.rank} {one.phase}", number, (one.rank,), text, is_fatal=False)
