"""Ways for a job to get stuck, each a function that one rank of several runs; see `test_stuck.py`."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minddp
from minddp.tools.watchdog.watched_transport import WatchedWaits

LIMIT_S = 1.0
FAULTY = 1  # the rank that does something else


class TwoBranches(nn.Module):
    """Uses `decoder` or leaves it out. If it `fails`, then in backward, between the gradients of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)

    def forward(self, x: Tensor, use_decoder: bool = True) -> Tensor:
        hidden = self.encoder(x)
        if self.fails:
            hidden.register_hook(lambda grad: 1 / 0)
        return self.decoder(hidden) if use_decoder else hidden


def wrap(stuck_after_s: float, **options: Any) -> minddp.DistributedDataParallel:
    torch.manual_seed(0)
    return minddp.DistributedDataParallel(TwoBranches(), stuck_after_s=stuck_after_s, **options)


def limit_s(ddp: minddp.DistributedDataParallel) -> float:
    return next(extension.limit_s for extension in ddp.extensions if isinstance(extension, WatchedWaits))


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer | None = None, **how: Any) -> None:
    ddp(torch.ones(2, 4), **how).sum().backward()
    if optimizer is not None:
        optimizer.step()


@dataclass
class Played:
    """How a scenario ended on a rank: the error, or "went on"; what the rank reported meanwhile, and when."""

    ended: str = "went on"
    ended_after_s: float = 0.0
    reports: list[tuple[float, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([self.ended, "reports:", *(text for _, text in self.reports)])

    def diagnoses(self) -> list[tuple[float, str]]:
        """What was reported or raised, after how many seconds."""
        return [*self.reports, (self.ended_after_s, self.ended)]


def played(rank: int, name: str, stuck_after_s: float = LIMIT_S) -> Played:
    """Play one scenario. Times are from its begin, when ranks have made two steps."""
    result, begin = Played(), time.monotonic()
    handler = logging.Handler()
    handler.emit = lambda record: result.reports.append((time.monotonic() - begin, record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("minddp.tools.watchdog").addHandler(handler)
    ddp = wrap(stuck_after_s, **OPTIONS.get(name, {}))
    try:
        for _ in range(2):
            step(ddp)
        begin = time.monotonic()
        SCENARIOS[name](rank, ddp)
    except Exception as error:
        result.ended = f"{type(error).__name__}: {error}"
    result.ended_after_s = time.monotonic() - begin
    return result


def branch_on_one_rank(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """The faulty rank leaves the decoder out, and is then busy with something else."""
    step(ddp, use_decoder=rank != FAULTY)
    time.sleep(6 * limit_s(ddp))


def dies(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    step(ddp)


def sleeps(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    if rank == FAULTY:
        time.sleep(6 * limit_s(ddp))
    step(ddp)


def raises_in_backward(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    if rank == FAULTY:
        try:
            output = ddp(torch.ones(2, 4))
            output.register_hook(lambda grad: 1 / 0)
            output.sum().backward()
        except ZeroDivisionError:
            time.sleep(6 * limit_s(ddp))
            return
    step(ddp)


def accumulates_alone(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    if rank == FAULTY:
        with ddp.no_sync():
            step(ddp)
            time.sleep(6 * limit_s(ddp))
        return
    step(ddp)


def data_ends_early(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """The faulty rank has one batch fewer and leaves, as a script that is at its end."""
    if rank == FAULTY:
        os._exit(0)
    step(ddp)


def skips_a_step(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    for turn in range(3):
        if rank == FAULTY and turn == 1:
            continue
        step(ddp)
    if rank == FAULTY:
        time.sleep(6 * limit_s(ddp))


def makes_an_extra_step(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    step(ddp)
    if rank == FAULTY:
        step(ddp)
    else:
        time.sleep(6 * limit_s(ddp))


def forgets_to_communicate(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """The communication hook of the faulty rank leaves its all-reduce out."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if rank != FAULTY:
            return group.allreduce([bucket.buffer()]).get_future().then(lambda future: future.value()[0])
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(ddp.process_group, hook)
    step(ddp)
    if rank == FAULTY:
        time.sleep(6 * limit_s(ddp))


def goes_on_after_an_exception(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """The faulty rank catches an exception in the middle of backward, and goes on with the next batch."""
    for batch in range(3):
        ddp.module.fails = rank == FAULTY and batch == 0
        try:
            step(ddp)
        except ZeroDivisionError:
            ddp.zero_grad()


def has_another_model(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """Replicas that are not verified: the faulty rank's decoder is wider."""
    module = TwoBranches()
    if rank == FAULTY:
        module.decoder = nn.Linear(4, 5)
    other = minddp.DistributedDataParallel(module, init_sync=False, stuck_after_s=limit_s(ddp))
    step(other)
    time.sleep(limit_s(ddp))


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        branch_on_one_rank,
        dies,
        sleeps,
        raises_in_backward,
        accumulates_alone,
        data_ends_early,
        skips_a_step,
        makes_an_extra_step,
        forgets_to_communicate,
        goes_on_after_an_exception,
        has_another_model,
    )
}
ONE_BUCKET_EACH = {"bucket_cap_mb": 1e-5, "first_bucket_cap_mb": 1e-5}
OPTIONS: dict[str, dict[str, Any]] = {"goes_on_after_an_exception": ONE_BUCKET_EACH}
