"""Trainings that go wrong without an error, each a function that one rank of several runs; see `test_guard.py`.

Each takes steps by `train`, with which a rank may do something else than the others.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minddp
from minddp.tools.watchdog import comparison

FAULTY = 1  # the rank that does something else
STEPS = 25


def wrap(**options: Any) -> minddp.DistributedDataParallel:
    torch.manual_seed(0)
    # No bias before what subtracts the mean: its gradient would be rounding, and now and then 0.
    module = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    return minddp.DistributedDataParallel(module, **options)


def sgd(ddp: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9)


def train(
    rank: int,
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    forward: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[int], object] = lambda step: None,
    seed_of_rank: int = 1,
    steps: int = STEPS,
) -> None:
    for step in range(steps):
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + seed_of_rank * rank))
        optimizer.zero_grad()
        (forward or ddp)(inputs).square().mean().backward()
        optimizer.step()
        after(step)


@contextlib.contextmanager
def reports() -> Iterator[list[str]]:
    """What this rank logs meanwhile."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("minddp.tools.watchdog")
    log.addHandler(handler)
    try:
        yield logged
    finally:
        log.removeHandler(handler)


def findings(rank: int, name: str) -> list[str]:
    """Play one scenario to the end of its wrapper; what this rank reports."""
    with reports() as logged:
        ddp = wrap()
        SCENARIOS[name](rank, ddp)
        dist.barrier()
        close(ddp)
    return logged


def close(ddp: minddp.DistributedDataParallel) -> None:
    """End the guard, whose threads may have to wait for a core before they make the last exchange."""
    assert ddp.guard is not None
    with mock.patch.object(comparison, "LAST_S", 10.0):
        ddp.guard.close()


def calm(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    train(rank, ddp, sgd(ddp))


def another_learning_rate(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    train(rank, ddp, sgd(ddp, lr=0.2 if rank == FAULTY else 0.1))


def checkpoint_on_one_rank(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """Weights are loaded after wrapping, where rank 0's are no longer broadcast."""
    if rank == 0:
        ddp.module.load_state_dict({name: value * 2 for name, value in ddp.module.state_dict().items()})
    train(rank, ddp, sgd(ddp))


def optimizer_of_one_rank(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """One rank has resumed its optimizer, the others begin with an empty state."""
    optimizer = sgd(ddp)
    if rank == 0:
        for param in ddp.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.ones_like(param)
    train(rank, ddp, optimizer)


def write_on_one_rank(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    def clip(step: int) -> None:
        if rank == FAULTY and step == 12:
            with torch.no_grad():
                ddp.module[0].weight.clamp_(-0.1, 0.1)

    train(rank, ddp, sgd(ddp), after=clip)


def bare_module(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    train(rank, ddp, sgd(ddp), forward=ddp.module)


def no_sync_for_good(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    with ddp.no_sync():
        train(rank, ddp, sgd(ddp))


def every_fifth_step_alone(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    counted = iter(range(STEPS))
    train(rank, ddp, sgd(ddp), forward=lambda x: ddp.module(x) if next(counted) % 5 == 4 else ddp(x))


def hook_that_forgets(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    """A communication hook that returns each rank's own gradients."""

    def keeps_its_own(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, keeps_its_own)
    train(rank, ddp, sgd(ddp))


def same_data(rank: int, ddp: minddp.DistributedDataParallel) -> None:
    train(rank, ddp, sgd(ddp), seed_of_rank=0)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        calm,
        another_learning_rate,
        checkpoint_on_one_rank,
        optimizer_of_one_rank,
        write_on_one_rank,
        bare_module,
        no_sync_for_good,
        every_fifth_step_alone,
        hook_that_forgets,
        same_data,
    )
}
