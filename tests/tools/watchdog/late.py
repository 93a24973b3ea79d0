"""Training in which one rank is late, a function that each of several ranks runs; see `test_late_ranks.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minddp
from minddp.tools.forecast.lateness import LateRank, RankTimes, late_ranks
from minddp.tools.watchdog import check as schedule
from minddp.tools.watchdog import comparison, slow_rank
from minddp.tools.watchdog.check import Finding
from minddp.tools.watchdog.slow_rank import WARM_UP_STEPS
from tests.tools.watchdog.harness import wait_until

PLACES = ("between", "forward", "backward", "optimizer", "accumulation")


@dataclass(frozen=True)
class Delay:
    """`rank`, or each, sleeps for `seconds` at a place of each step that is compared."""

    rank: int | None = 1
    place: str = "between"
    seconds: float = 0.02

    def sleep(self, place: str, rank: int, step: int) -> float:
        """The seconds for which it has slept, which a loaded machine makes longer."""
        if place != self.place or self.rank not in (rank, None) or step < WARM_UP_STEPS:
            return 0.0
        began = time.perf_counter()
        time.sleep(self.seconds)
        return time.perf_counter() - began


class Model(nn.Module):
    """A perceptron with buffers, which `sleep("forward")` and `sleep("backward")` of each step."""

    def __init__(self, sleep: Any):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
        self.sleep = sleep

    def forward(self, x: Tensor) -> Tensor:
        self.sleep("forward")
        output = self.net(x)
        if output.requires_grad:
            output.register_hook(lambda grad: self.sleep("backward"))
        return output


@dataclass(frozen=True)
class Outcome:
    """A rank's median sleep; on rank 0 the findings, and the late ranks of the first window."""

    found: list[Finding]
    late: list[LateRank]
    slept_s: float


def train(rank: int, delay: Delay, steps: int, window_steps: int, options: Mapping[str, Any] = {}) -> Outcome:
    """Some steps of a wrapped model, and then a wait until those of a window have been compared."""
    step = 0
    slept_s = []
    judged: list[list[LateRank]] = []

    def judge(steps: Sequence[Sequence[RankTimes]]) -> list[LateRank]:
        judged.append(late_ranks(steps))
        return judged[-1]

    def sleep(place: str) -> None:
        if seconds := delay.sleep(place, rank, step):
            slept_s.append(seconds)

    class Optimizer(torch.optim.SGD):
        def step(self, *args: Any) -> None:  # type: ignore[override]
            sleep("optimizer")
            super().step(*args)

    torch.manual_seed(rank)
    with (
        mock.patch.object(comparison, "EVERY_S", 0.05),
        mock.patch.object(schedule, "FIRST", steps),
        mock.patch.multiple(slow_rank, WINDOW_STEPS=window_steps, WINDOW_S=0.0, late_ranks=judge),
    ):
        ddp = minddp.DistributedDataParallel(Model(sleep), **options)
        optimizer = Optimizer(ddp.parameters(), lr=0.01)
        assert ddp.guard is not None
        x = torch.randn(16, 32)
        for step in range(steps):  # noqa: B007
            sleep("between")
            if delay.place == "accumulation":
                with ddp.no_sync():
                    ddp(x).sum().backward()
                    sleep("accumulation")
            ddp(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = ddp.guard.findings
        wait_until(lambda: rank != 0 or judged)
        dist.barrier()
        ddp.guard.close()
    return Outcome(found, judged[0] if judged else [], statistics.median(slept_s or [0.0]))
