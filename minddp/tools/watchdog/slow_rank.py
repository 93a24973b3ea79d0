"""A rank that makes the others wait.

Each rank measures, by the clock of its host, how long each phase of the sampled steps takes and how long it waits;
rank 0 compares windows of steps. See [Note: late ranks] in `tools/forecast/lateness.py`. On an accelerator that
clock shows when kernels are launched and not when they run, so the check is off there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from minddp.tools.forecast.lateness import PHASES, LateRank, RankTimes, WorkPhase, late_ranks
from minddp.tools.watchdog.check import Check, Finding, Notes, is_sampled

WARM_UP_STEPS = 10  # memory is allocated, code compiled, buckets are rebuilt
LEAST_LATE_NS = 1_000_000  # a shorter delay is scheduling noise
MOST_KEPT = 1024  # steps; older ones are dropped if notes are not read in time
WAITS = None  # the training thread waits for other ranks, and is in no phase


class Window(NamedTuple):
    """Rank 0 compares windows of at least `steps` sampled steps and `seconds`.

    A rank is reported if it is late in the same phase in at least `in_a_row` windows and for `lasts_s`: threads
    share a core for some ten seconds at a time.
    """

    steps: int = 20
    seconds: float = 10.0
    in_a_row: int = 2
    lasts_s: float = 90.0


class SlowRank(Check):
    """Measures the phases of steps, and compares those of all ranks.

    On rank 0, for the latest window: `waited_ns` is the mean wait of a rank in a step, `late` the late ranks.
    """

    def __init__(self) -> None:
        self.waited_ns: float | None = None
        self.late: list[LateRank] = []
        self.window = Window()
        # Of this rank: what it measures.
        self._noted: deque[tuple[int, list[int]]] = deque(maxlen=MOST_KEPT)
        self._phase: WorkPhase | None = WorkPhase.BETWEEN
        self._around_optimizer: WorkPhase | None = WorkPhase.BETWEEN
        self._reset()
        self._since_ns = perf_counter_ns()
        # Of rank 0: the steps of this window, its beginning, and since when and in how many windows a rank is late.
        self._compared: list[list[RankTimes]] = []
        self._first_step = self._began_ns = 0
        self._late_since: dict[tuple[int, str], tuple[int, int]] = {}

    def _reset(self) -> None:
        self._times: dict[WorkPhase | None, int] = dict.fromkeys((*PHASES, WAITS), 0)
        self._step: int | None = None
        self._is_computed = False

    def pre_forward(self) -> None:
        if self._phase is WorkPhase.BACKWARD:  # the last forward had none
            self._phase = WorkPhase.BETWEEN
        self._turn_to(WAITS)

    def before_module(self, step: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._turn_to(WorkPhase.FORWARD)

    def post_forward(self, synchronises: bool) -> None:
        self._turn_to(WorkPhase.BACKWARD if synchronises else WorkPhase.ACCUMULATION)

    def first_gradient(self, step: int) -> None:
        self._step = step if is_sampled(step) else None

    def before_unpack(self) -> None:
        self._turn_to(WAITS)
        self._is_computed = True

    def post_backward(self) -> None:
        self._turn_to(WorkPhase.BETWEEN)
        if self._is_computed and self._step is not None:
            self._noted.append((self._step, [*self._times.values()]))
        self._reset()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._phase is not WorkPhase.OPTIMIZER:  # a subclass calls its superclass within
            self._around_optimizer = self._phase
        self._turn_to(WorkPhase.OPTIMIZER)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._turn_to(self._around_optimizer)

    def _turn_to(self, phase: WorkPhase | None) -> None:
        now_ns = perf_counter_ns()
        self._times[self._phase] += now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns

    def take_notes(self, is_last: bool = False) -> Notes:
        return [self._noted.popleft() for _ in range(len(self._noted))]

    def compare(self, number: int, notes: Sequence[Any]) -> Iterable[Finding]:
        """Step `number` of all ranks."""
        now_ns = perf_counter_ns()
        if number < WARM_UP_STEPS:
            return
        if not self._compared:
            self._began_ns, self._first_step = now_ns, number
        self._compared.append([RankTimes(*times) for times in notes])
        if len(self._compared) < self.window.steps or now_ns - self._began_ns < 1e9 * self.window.seconds:
            return
        steps, self._compared = self._compared, []
        self.waited_ns = fmean(times.waited_ns for step in steps for times in step)
        self.late = list(self._late_for_long(steps, now_ns))
        for late in self.late:
            text = (
                f"{late} Measured in steps {self._first_step} to {number}. Compare its data loading, its work "
                f"and its machine with the others'; `minddp xray` shows a step."
            )
            yield Finding("slow_rank", f"rank {late.rank} {late.phase}", number, (late.rank,), text, is_fatal=False)

    def _late_for_long(self, steps: Sequence[Sequence[RankTimes]], now_ns: int) -> Iterable[LateRank]:
        known, self._late_since = self._late_since, {}
        for late in late_ranks(steps):
            if late.late_ns >= LEAST_LATE_NS:
                kind = late.rank, late.phase
                since_ns, windows = known.get(kind, (self._began_ns, 0))
                self._late_since[kind] = since_ns, windows + 1
                if windows + 1 >= self.window.in_a_row and now_ns - since_ns >= 1e9 * self.window.lasts_s:
                    yield late
