"""Ways for a job to get stuck, each a function that one rank of several runs; see `test_stuck.py`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minddp
from minddp.tools.watchdog.watched_transport import WatchedWaits
from tests.tools.watchdog.harness import reports

LIMIT_S = 1.0
FAULTY = 1  # the rank that does something else
ONE_BUCKET_EACH = {"bucket_cap_mb": 1e-5, "first_bucket_cap_mb": 1e-5}
Play = Callable[[int, minddp.DistributedDataParallel], None]


@dataclass(frozen=True)
class Scenario:
    """`cause`: a pattern of what is said of it, in time. `end`: one of the errors that waiting ranks raise."""

    play: Play
    cause: str
    end: str | None
    options: dict[str, Any]


DROPPED = "Rank 1 has dropped the module"
SCENARIOS: dict[str, Scenario] = {}


def said(cause: str, end: str | None = None, **options: Any) -> Callable[[Play], Play]:
    def add(play: Play) -> Play:
        SCENARIOS[play.__name__] = Scenario(play, cause, end, options)
        return play

    return add


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


def step(ddp: nn.Module, **how: Any) -> None:
    ddp(torch.ones(2, 4), **how).sum().backward()


def limit_s(ddp: minddp.DistributedDataParallel) -> float:
    return next(extension.limit_s for extension in ddp.extensions if isinstance(extension, WatchedWaits))


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
    scenario, ended = SCENARIOS[name], "went on"
    torch.manual_seed(0)
    with reports() as logged:
        ddp = minddp.DistributedDataParallel(TwoBranches(), stuck_after_s=stuck_after_s, **scenario.options)
        try:
            for _ in range(2):
                step(ddp)
            logged.began = time.monotonic()
            scenario.play(rank, ddp)
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
        ended_after_s = time.monotonic() - logged.began
    return Played(ended, ended_after_s, [*zip(logged.seconds, logged, strict=True)])


@said("Rank 1 has not produced gradients for `decoder.weight`, `decoder.bias`: ", DROPPED)
def branch_on_one_rank(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """The faulty rank leaves the decoder out, and is then busy with something else."""
    step(ddp, use_decoder=rank != FAULTY)
    time.sleep(6 * limit_s(ddp))


@said("Rank 1 (has exited|has ended)", r"Rank 1 has exited; its own output says why\.")
def dies(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    step(ddp)


@said(r"Rank 1 is between backwards, at backward 2 of 3, stuck.py:\d+ in sleeps")
def sleeps(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    if rank == FAULTY:
        time.sleep(6 * limit_s(ddp))
    step(ddp)


@said(r"Rank 1 is between forward and backward.*, stuck.py:\d+ in raises_in_backward", DROPPED)
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


@said("Rank 1 accumulates under no_sync", DROPPED)
def accumulates_alone(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    if rank == FAULTY:
        with ddp.no_sync():
            step(ddp)
            time.sleep(6 * limit_s(ddp))
        return
    step(ddp)


@said("Rank 1 (has exited|has ended)", "Rank 1 has exited")
def data_ends_early(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """The faulty rank has one batch fewer and leaves, as a script that is at its end."""
    if rank == FAULTY:
        os._exit(0)
    step(ddp)


@said("Rank 1 is between backwards, at backward 4 of 5", DROPPED)
def skips_a_step(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    for turn in range(3):
        if rank == FAULTY and turn == 1:
            continue
        step(ddp)
    if rank == FAULTY:
        time.sleep(6 * limit_s(ddp))


@said("Rank 1 waits in collective 6")
def makes_an_extra_step(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    step(ddp)
    if rank == FAULTY:
        step(ddp)
    else:
        time.sleep(6 * limit_s(ddp))


@said(r"Rank 1 is between backwards, stuck.py:\d+ in forgets_to_communicate", DROPPED)
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


@said(
    "An exception has ended backward 3 on rank 1",
    r"ended backward 3 on rank 1 before the gradients of `encoder\.weight`, `encoder\.bias` had arrived\. "
    r"Its script has caught the exception and goes on, stuck\.py:\d+ in step, "
    r"but (rank 0 has|rank 2 has|ranks 0 and 2 have) launched further",  # so far, when they were asked
    **ONE_BUCKET_EACH,
)
def goes_on_after_an_exception(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """The faulty rank catches an exception in the middle of backward, and goes on with the next batch."""
    for batch in range(3):
        ddp.module.fails = rank == FAULTY and batch == 0
        try:
            step(ddp)
        except ZeroDivisionError:
            ddp.zero_grad()


@said("Collective 1 is not the same everywhere: .*all-reduce of 45 float32.*The ranks differ in model, options or ")
def has_another_model(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """Replicas that are not verified: the faulty rank's decoder is wider."""
    module = TwoBranches()
    if rank == FAULTY:
        module.decoder = nn.Linear(4, 5)
    other = minddp.DistributedDataParallel(module, init_sync=False, stuck_after_s=limit_s(ddp))
    step(other)
    time.sleep(limit_s(ddp))
