"""How all ranks end at the same step: on a signal, when the time is up, or without a launcher.

A rank that stops alone would leave the others waiting in the next all-reduce. So before every step the ranks vote,
with an all-reduce of two numbers: the largest signal number that any rank has received, and rank 0's clock.
"""

from __future__ import annotations

import os
import signal
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minddp.tools.train.world import World

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


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
    signal_name: str | None  # None: no rank has received a signal
    elapsed_s: float  # by rank 0's clock


def vote(world: World, signal_number: int, elapsed_s: float) -> Verdict:
    """Agree on a signal and on the time. Collective."""
    ballot = torch.tensor([signal_number, elapsed_s if world.is_main else 0.0], dtype=torch.float64)
    dist.all_reduce(ballot, dist.ReduceOp.MAX, group=world.control)
    number, elapsed_s = ballot.tolist()
    return Verdict(signal.Signals(number).name if number else None, elapsed_s)
