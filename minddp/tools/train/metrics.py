"""Averages over ranks, and the file and lines in which a run reports them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minddp.tools.train.checkpoint import write_atomically
from minddp.tools.train.task import Task


class Means(NamedTuple):
    """Averages per target."""

    loss: float  # in nats if it is a cross entropy
    accuracy: float
    targets: int


class Averages:
    """Loss and accuracy over many batches and all ranks.

    A mean of means would give a short batch the weight of a full one. So each rank accumulates sums and counts, an
    all-reduce adds them, and one division follows. The sums stay on the device until they are read, so the CPU does
    not wait for a GPU.
    """

    def __init__(self, device: torch.device):
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # losses, accuracies, number of targets

    @torch.no_grad()
    def add(self, task: Task, mean_loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        accuracy = task.accuracy(outputs, targets) if task.accuracy else torch.zeros_like(mean_loss)
        means = torch.stack((mean_loss.double(), accuracy.double(), self._sums.new_tensor(1)))
        self._sums += means * targets.numel()

    def over_ranks(self) -> Means:
        """The averages over all batches that the ranks have added since the last call. Collective."""
        dist.all_reduce(self._sums)
        loss, accuracy, targets = self._sums.tolist()
        self._sums.zero_()
        return Means(loss / targets, accuracy / targets, int(targets))


class MetricsLog:
    """`metrics.jsonl`: one JSON object per line, each with its `kind` and `step`. Rank 0 writes and prints it."""

    def __init__(self, path: Path, writes: bool = True):
        self._path = path
        self._writes = writes

    def append(self, kind: str, step: int, **record: Any) -> None:
        if not self._writes:
            return
        rounded = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in record.items()}
        shown = [f"{name} {value}" for name, value in rounded.items() if name != "settings"]
        print(f"{kind:<10}  step {step}", *shown, sep="  ", flush=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **record}, default=str) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop records of later steps, which a resumed run writes again, and a line that was cut off."""
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        kept = [line for line in lines if line.endswith(b"}") and json.loads(line)["step"] <= step]
        write_atomically(self._path, lambda file: file.write(b"".join(line + b"\n" for line in kept)))
