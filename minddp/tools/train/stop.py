"""How all ranks end at the same step: on a signal, when the time is up, on a full disk, or without a launcher.

A rank that stops alone would leave the others waiting in the next all-reduce. So in every step the ranks vote, with
an all-reduce of two numbers: the largest signal number that any rank has received, and rank 0's clock. The vote
travels while the model computes: what a rank learns during a step takes effect one step later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minddp.tools.train.settings import Settings
from minddp.tools.train.world import World

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
CANNOT_WRITE = 1000  # voted like a signal number: rank 0 cannot write its files


class StopSignals:
    """A context in which `STOP_SIGNALS` do not end the process; `received` is the last one, or 0."""

    def __init__(self) -> None:
        self.received = 0
        self._handlers: dict[int, Any] = {}
        self._launcher = os.getppid()

    def __enter__(self) -> StopSignals:
        self._handlers = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        self.received = number

    @property
    def pending(self) -> int:
        """The signal to stop for, or 0. The death of the launcher counts as SIGHUP."""
        launcher_is_gone = os.getppid() != self._launcher
        return self.received or (signal.SIGHUP if launcher_is_gone else 0)


class Verdict(NamedTuple):
    signal_number: int  # 0: no rank has received one
    elapsed_s: float  # by rank 0's clock

    def reason_to_end(self, settings: Settings, step: int) -> str | None:
        """Why the run ends after `step` steps: a signal's name, "cannot write", "finished", or None to continue."""
        if self.signal_number == CANNOT_WRITE:
            return "cannot write"
        if self.signal_number:
            return signal.Signals(self.signal_number).name
        if step >= settings.limit_steps or self.elapsed_s >= settings.limit_s:
            return "finished"
        return None


def vote(world: World, signal_number: int, elapsed_s: float) -> Callable[[], Verdict]:
    """Start the all-reduce of a vote. Returns a function that waits for the verdict. Collective."""
    ballot = torch.tensor([signal_number, elapsed_s if world.is_main else 0.0], dtype=torch.float64)
    work = dist.all_reduce(ballot, dist.ReduceOp.MAX, group=world.control, async_op=True)

    def verdict() -> Verdict:
        work.wait()
        signal_number, elapsed_s = ballot.tolist()
        return Verdict(int(signal_number), elapsed_s)

    return verdict
