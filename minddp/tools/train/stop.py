"""How all ranks end at the same step: on a signal, or without a launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from minddp.tools.job.launcher import STOP_SIGNALS
from minddp.tools.train.world import World


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """In the block `STOP_SIGNALS` do not end the process; yields a function that returns the last one, or 0.

    The death of the launcher counts as SIGHUP.
    """
    received, launcher = [0], os.getppid()

    def pending() -> int:
        launcher_is_gone = os.getppid() != launcher
        return received[-1] or (signal.SIGHUP if launcher_is_gone else 0)

    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in STOP_SIGNALS}
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def vote(world: World, signal_number: int) -> str | None:
    """The name of the largest signal number that any rank votes for; None if all vote for 0. Collective.

    A rank that stops alone would leave the others waiting in the next all-reduce. So the ranks vote after every
    step.
    """
    ballot = torch.tensor(signal_number)
    dist.all_reduce(ballot, dist.ReduceOp.MAX, group=world.control)
    return signal.Signals(int(ballot)).name if ballot else None
