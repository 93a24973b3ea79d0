"""Averages over ranks, where ranks spend their time, and where all that is written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minddp.tools.train.checkpoint_files import write_atomically
from minddp.tools.train.settings import RunError, Settings
from minddp.tools.train.task import Task
from minddp.tools.watchdog.slow_rank import SlowRank


@dataclass(frozen=True)
class Means:
    """Averages per target."""

    loss: float  # in nats, if it is a cross entropy
    accuracy: float
    targets: int


class Averages:
    """Loss and accuracy over many batches and all ranks.

    [Note: sums, then one division]
    A mean of means weights a short batch like a full one. So each rank adds up sums and counts, the ranks add up
    theirs, and there is one division at the end. The sums stay on the device until they are read, so the CPU does
    not wait for a GPU. Each share has sums of its own: their order does not depend on the number of ranks.
    """

    def __init__(self, num_shares: int, device: torch.device):
        # Of each share: of losses, of accuracies, of targets.
        self.sums = torch.zeros(num_shares, 3, dtype=torch.float64, device=device)
        self.known = self.sums.clone()  # those of all ranks, until the last `spread`

    @torch.no_grad()
    def add(self, share: int, task: Task, mean_loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        accuracy = task.accuracy(outputs, targets) if task.accuracy else torch.zeros_like(mean_loss)
        means = torch.stack((mean_loss.double(), accuracy.double(), self.sums.new_tensor(1)))
        self.sums[share] += means * targets.numel()

    def spread(self) -> None:
        """Let all ranks know what each has added, so that a lost rank takes nothing with it. Collective."""
        dist.all_reduce(self.sums)
        self.known += self.sums
        self.sums.zero_()

    def over_ranks(self) -> Means:
        """Averages over all that the ranks have added since the last call. Collective."""
        self.spread()
        losses, accuracies, targets = self.known.sum(0).tolist()
        self.known.zero_()
        return Means(losses / targets, accuracies / targets, int(targets))


def waiting(ddp: nn.Module) -> dict[str, Any]:
    """Fields of a training record: how long the mean rank waits in a step, and for which one if there is one.

    `late_ms` is by how much that rank is late in the steps in which it is, mostly in `late_phase`. Empty on other
    ranks than 0, before the first window of steps is complete, under torch's wrapper and on accelerators.
    """
    check = getattr(getattr(ddp, "guard", None), "checks", {}).get("slow_rank")
    if not isinstance(check, SlowRank) or check.waited_ns is None:
        return {}
    fields: dict[str, Any] = {"waited_ms": check.waited_ns / 1e6}
    for late in check.late[:1]:
        fields |= {"late_rank": late.rank, "late_phase": late.phase, "late_ms": late.late_ns / 1e6}
    return fields


class MetricsLog:
    """`metrics.jsonl`: one JSON object per line, each with its `kind` and `step`; and what --track names."""

    def __init__(self, path: Path):
        self.path = path
        self.tracker: Tracker | None = None

    def append(self, **record: Any) -> None:
        """Raises RunError where it cannot be written."""
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise RunError(f"Cannot write {self.path}: {error.strerror}.") from error
        if self.tracker is not None:
            self.tracker.log(record)

    def records(self, kind: str) -> list[dict[str, Any]]:
        every = map(json.loads, self.path.read_text().splitlines())
        return [record for record in every if record["kind"] == kind]

    def forget_after(self, step: int) -> None:
        """Drop records of later steps, and a line that was cut off: a resumed run writes them again."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        kept = [line for line in lines if line.endswith(b"}") and json.loads(line)["step"] <= step]
        write_atomically(self.path, lambda file: file.write(b"".join(line + b"\n" for line in kept)))


class Tracker:
    """TensorBoard's event files in the run's folder, and the same in Weights & Biases, which reads along."""

    def __init__(self, settings: Settings):
        folder = settings.folder / "tensorboard"
        self._wandb: Any = None
        if "wandb" in settings.track:
            import wandb

            name = settings.folder.resolve().name
            wandb.tensorboard.patch(root_logdir=str(folder))
            self._wandb = wandb.init(project="minddp", id=name, dir=str(settings.folder), resume="allow")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()
