"""All ranks end at the same step: on a signal, when the time is up, on a full disk, or without their launcher.

[Note: the vote]
A rank that stops alone leaves the others waiting in the next all-reduce. So each step the ranks vote, in an
all-reduce of two numbers: the largest signal number that any rank has received, and the time on rank 0's clock. The
vote travels while the model computes, and what a rank learns during a step takes effect one step later.
"""

from __future__ import annotations

import os
import signal
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minddp.tools.train.settings import Settings
from minddp.tools.train.world import World

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
CANNOT_WRITE = 1000  # in the place of a signal's number: rank 0 cannot write its files


class StopSignals:
    """While entered, `STOP_SIGNALS` do not end the process; `received` remembers the last."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}
        self._launcher = os.getppid()

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: object) -> None:
        self.received = number

    @property
    def wanted(self) -> int:
        """The signal to stop for, 0 for none. A launcher that has died counts as SIGHUP."""
        launcher_is_gone = os.getppid() != self._launcher
        return self.received or (signal.SIGHUP if launcher_is_gone else 0)


class Verdict(NamedTuple):
    signal_number: int  # 0: no rank has received one
    elapsed_s: float  # by rank 0's clock


class Vote:
    """One step's agreement: made when the step starts, read when it ends. Collective."""

    def __init__(self, world: World, wanted: int, elapsed_s: float):
        self._ballot = torch.tensor([wanted, elapsed_s if world.is_main else 0.0], dtype=torch.float64)
        self._work = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, group=world.control, async_op=True)

    def result(self) -> Verdict:
        self._work.wait()
        signal_number, elapsed_s = self._ballot.tolist()
        return Verdict(int(signal_number), elapsed_s)


def reason_to_end(settings: Settings, step: int, verdict: Verdict) -> str | None:
    """Why the run ends after `step` steps: a signal's name, "cannot write", "finished", or None to go on."""
    if verdict.signal_number == CANNOT_WRITE:
        return "cannot write"
    if verdict.signal_number:
        return signal.Signals(verdict.signal_number).name
    if step >= settings.limit_steps or verdict.elapsed_s >= settings.limit_s:
        return "finished"
    return None
