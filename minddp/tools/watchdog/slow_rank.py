"""A rank that makes the others wait.

Each rank measures, by the clock of its host, how long each phase of the sampled steps takes and how long it waits;
rank 0 compares windows of steps. See [Note: late ranks] in `tools/forecast/lateness.py`. On an accelerator that
clock shows when kernels are launched and not when they run, so the check is off there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter_ns
from typing import Any

import torch

from minddp.tools.forecast.lateness import RankTimes, late_ranks
from minddp.tools.watchdog.check import Check, Finding, Notes, is_sampled

WARM_UP_STEPS = 10  # memory is allocated, code compiled, buckets are rebuilt
LEAST_LATE_NS = 1_000_000  # a shorter delay is scheduling noise
MOST_KEPT = 4096  # steps: of notes that are not read in time the latest, of a window the first
# The places in `RankTimes` of the phases, and of the waits for other ranks. No enum: hashing it takes longer.
BETWEEN, FORWARD, BACKWARD, OPTIMIZER, ACCUMULATION, WAITS = range(len(RankTimes._fields))
# Rank 0 compares windows of at least so many sampled steps and seconds: threads share a core for some ten seconds.
WINDOW_STEPS = 20
WINDOW_S = 90.0
# A rank that costs this share of a step is a hint in the first window already, after so many seconds.
HINT_SHARE, HINT_S = 0.3, 10.0


class SlowRank(Check):
    """Measures the phases of steps, and compares those of all ranks."""

    def __init__(self) -> None:
        # Of this rank: what it measures.
        self._noted: deque[tuple[int, list[int]]] = deque(maxlen=MOST_KEPT)
        self._phase = BETWEEN
        self._reset()
        self._since_ns = perf_counter_ns()
        # Of rank 0: the steps of this window, and its beginning.
        self._window: list[list[RankTimes]] = []
        self._first_step = self._began_ns = 0
        self._hints = True  # once

    def _reset(self) -> None:
        self._times = [0] * len(RankTimes._fields)
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
            self._window.append([RankTimes(*times) for times in notes])
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
