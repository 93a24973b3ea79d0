"""Averages over ranks, and the file they are written to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minddp.train.atomic import write_atomically


@dataclass(frozen=True)
class Means:
    """Averages per target."""

    loss: float  # in nats
    accuracy: float  # share of targets that got the highest score
    targets: int


class Averages:
    """Loss and accuracy over many batches and all ranks.

    [Note: sums, then one division]
    A mean of means weights a short batch like a full one. So each rank adds up sums and counts, the ranks
    add up theirs, and there is one division at the end. The sums stay on the device, in float64, until they
    are read: adding to them does not make the CPU wait for a GPU.
    """

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # of losses, of hits, of targets

    @torch.no_grad()
    def add(self, mean_loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Count a batch: its mean loss, logits (..., classes), targets (...)."""
        hits = (logits.argmax(dim=-1) == targets).sum()
        count = targets.numel()
        self.sums += torch.stack((mean_loss.double() * count, hits.double(), self.sums.new_tensor(count)))

    def over_ranks(self) -> Means:
        """Averages over all that the ranks have added since the last call. Collective."""
        total = self.sums.clone()
        self.sums.zero_()
        dist.all_reduce(total)
        losses, hits, targets = total.tolist()
        return Means(losses / targets, hits / targets, int(targets))


class MetricsLog:
    """`metrics.jsonl`: one JSON object per line, each with its `kind` and `step`."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, **record: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self, kind: str) -> Iterator[dict[str, Any]]:
        """The records of one kind, in order."""
        for line in self.path.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == kind:
                yield record

    def forget_after(self, step: int) -> None:
        """Drop records of later steps, and a line that was cut off: a resumed run writes them again."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        write_atomically(self.path, lambda file: file.writelines(line + b"\n" for line in kept))


def _step_of(line: bytes) -> float:
    """The step of a record; infinite for what is not a whole record."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return float("inf")
