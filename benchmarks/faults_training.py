"""One training, survived in two ways: the script of each process of benchmarks/faults.py.

    python -m benchmarks.faults_training WAY FOLDER STEPS

In each step all 8 shares of a batch are computed, dealt to the processes. What happens is written to a file in
FOLDER, line by line, as JSON: each attempt at a step, each step that has counted, and the digest of all parameters
at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minddp

NUM_SHARES = 8
SAMPLES = 16  # of a share
SHARE_S = 0.003  # in place of a larger model's computation
CHECKPOINT_EVERY = 20  # steps


class Training:
    def __init__(self, folder: str):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.report = open(f"{folder}/{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115

    def note(self, event: str, **facts: Any) -> None:
        self.report.write(json.dumps({"event": event, "time": time.time(), "pid": os.getpid(), **facts}) + "\n")

    def loss(self, ddp: Any, step: int, shares: Sequence[int]) -> torch.Tensor:
        """The loss of these shares of the step, as one batch."""
        seeds = [torch.Generator().manual_seed(NUM_SHARES * step + share) for share in shares]
        x = torch.cat([torch.randn(SAMPLES, 32, generator=seed) for seed in seeds])
        time.sleep(SHARE_S * len(shares))
        return (ddp(x) - x[:, :8].sin()).square().mean()

    def end(self) -> None:
        state = [value for state in self.optimizer.state.values() for value in state.values()]
        values = b"".join(each.detach().numpy().tobytes() for each in [*self.model.parameters(), *state])
        self.note("end", digest=hashlib.sha256(values).hexdigest())


def by_elastic(training: Training, folder: str, steps: int) -> None:
    """minddp.elastic: the others compute the step again."""
    session = minddp.elastic.join()
    ddp = minddp.DistributedDataParallel(training.model, logical_ranks=NUM_SHARES)
    for step in session.steps(ddp, training.optimizer, last=steps):
        with step:
            training.note("begin", step=step.number, place=dist.get_rank())
            for share in ddp.shares():
                training.loss(ddp, step.number, [share]).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.note("step", step=step.number, place=dist.get_rank())
    training.end()


def by_restart(training: Training, folder: str, steps: int) -> None:
    """torchrun --max-restarts: all processes are started again, and go on from the newest checkpoint."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares, path, first = list(range(NUM_SHARES))[rank::world_size], Path(folder, "checkpoint.pt"), 0
    if path.exists():
        state = torch.load(path)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    ddp = nn.parallel.DistributedDataParallel(training.model)
    for step in range(first, steps):
        training.note("begin", step=step, place=rank)
        training.loss(ddp, step, shares).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.note("step", step=step, place=rank)
        if rank == 0 and (step + 1) % CHECKPOINT_EVERY == 0:
            state = {"step": step + 1, "model": training.model.state_dict()}
            torch.save({**state, "optimizer": training.optimizer.state_dict()}, f"{path}.new")
            os.replace(f"{path}.new", path)
    training.end()
    dist.destroy_process_group()


WAYS: dict[str, Callable[[Training, str, int], None]] = {
    "elastic": by_elastic,
    "restart": by_restart,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    way, to, number = sys.argv[1:]
    WAYS[way](Training(to), to, int(number))
