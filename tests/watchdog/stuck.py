"""Ways for a job to get stuck, each a function that one rank of several runs; see `test_stuck.py`."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minddp

LIMIT_S = 1.0
FAULTY = 1  # the rank that does something else


class TwoBranches(nn.Module):
    """Uses `decoder` or leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)

    def forward(self, x: Tensor, use_decoder: bool = True) -> Tensor:
        hidden = self.encoder(x)
        return self.decoder(hidden) if use_decoder else hidden


def wrap(**options: Any) -> minddp.DistributedDataParallel:
    torch.manual_seed(0)
    return minddp.DistributedDataParallel(TwoBranches(), stuck_after_s=LIMIT_S, **options)


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer | None = None, **how: Any) -> None:
    ddp(torch.ones(2, 4), **how).sum().backward()
    if optimizer is not None:
        optimizer.step()


def outcome(rank: int, name: str) -> str:
    """Play one scenario; the error that this rank gets, or that it went on, and what it reported meanwhile."""
    reports: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reports.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("minddp.watchdog").addHandler(handler)
    ddp = wrap()
    try:
        for _ in range(2):
            step(ddp)
        SCENARIOS[name](rank, ddp)
        ended = "went on"
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    return "\n".join([ended, "reports:", *reports])


def branch_on_one_rank(rank: int, ddp: nn.Module) -> None:
    """The faulty rank leaves the decoder out, and is then busy with something else."""
    step(ddp, use_decoder=rank != FAULTY)
    time.sleep(6 * LIMIT_S)


def dies(rank: int, ddp: nn.Module) -> None:
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    step(ddp)


def sleeps(rank: int, ddp: nn.Module) -> None:
    if rank == FAULTY:
        time.sleep(6 * LIMIT_S)
    step(ddp)


def raises_in_backward(rank: int, ddp: nn.Module) -> None:
    if rank == FAULTY:
        try:
            output = ddp(torch.ones(2, 4))
            output.register_hook(lambda grad: 1 / 0)
            output.sum().backward()
        except ZeroDivisionError:
            time.sleep(6 * LIMIT_S)
            return
    step(ddp)


def accumulates_alone(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    if rank == FAULTY:
        with ddp.no_sync():
            step(ddp)
            time.sleep(6 * LIMIT_S)
        return
    step(ddp)


def data_ends_early(rank: int, ddp: nn.Module) -> None:
    """The faulty rank has one batch fewer and leaves, as a script that is at its end."""
    if rank == FAULTY:
        os._exit(0)
    step(ddp)


def skips_a_step(rank: int, ddp: nn.Module) -> None:
    for turn in range(3):
        if rank == FAULTY and turn == 1:
            continue
        step(ddp)
    if rank == FAULTY:
        time.sleep(6 * LIMIT_S)


def makes_an_extra_step(rank: int, ddp: nn.Module) -> None:
    step(ddp)
    if rank == FAULTY:
        step(ddp)
    else:
        time.sleep(6 * LIMIT_S)


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
        time.sleep(6 * LIMIT_S)


def has_another_model(rank: int, ddp: nn.Module) -> None:
    """Replicas that are not verified: the faulty rank's decoder is wider."""
    module = TwoBranches()
    if rank == FAULTY:
        module.decoder = nn.Linear(4, 5)
    other = minddp.DistributedDataParallel(module, init_sync=False, stuck_after_s=LIMIT_S)
    step(other)
    time.sleep(LIMIT_S)


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
        has_another_model,
    )
}
