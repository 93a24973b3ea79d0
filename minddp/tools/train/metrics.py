"""Averages over ranks, and the files and lines in which a run reports them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minddp.tools.train.checkpoint import write_atomically
from minddp.tools.train.settings import Settings
from minddp.tools.train.task import Task
from minddp.tools.watchdog.slow_rank import SlowRank


@dataclass(frozen=True)
class Means:
    """Averages per target."""

    loss: float  # in nats if it is a cross entropy
    accuracy: float
    targets: int


class Averages:
    """Loss and accuracy over many batches and all ranks.

    A mean of means would give a short batch the weight of a full one. So each rank accumulates sums and counts, an
    all-reduce adds them, and one division follows. The sums stay on the device until they are read, so the CPU does
    not wait for a GPU. Each logical rank has its own row: the order of the sum does not depend on the number of
    ranks.
    """

    def __init__(self, num_logical_ranks: int, device: torch.device):
        # One row per logical rank: the sums of losses and accuracies, and the number of targets.
        self.sums = torch.zeros(num_logical_ranks, 3, dtype=torch.float64, device=device)
        self.reduced = self.sums.clone()  # the sums over all ranks, up to the last `reduce`

    @torch.no_grad()
    def add(self, logical_rank: int, task: Task, mean_loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        accuracy = task.accuracy(outputs, targets) if task.accuracy else torch.zeros_like(mean_loss)
        means = torch.stack((mean_loss.double(), accuracy.double(), self.sums.new_tensor(1)))
        self.sums[logical_rank] += means * targets.numel()

    def reduce(self) -> None:
        """All-reduce the sums, so that none is lost with a rank. Collective."""
        dist.all_reduce(self.sums)
        self.reduced += self.sums
        self.sums.zero_()

    def over_ranks(self) -> Means:
        """The averages over all batches that the ranks have added since the last call. Collective."""
        self.reduce()
        losses, accuracies, targets = self.reduced.sum(0).tolist()
        self.reduced.zero_()
        return Means(losses / targets, accuracies / targets, int(targets))


def waiting(ddp: nn.Module) -> dict[str, Any]:
    """The guard's fields of a training record; empty until the guard has compared a window of steps.

    `waited_ms` is the wait in a step, averaged over the ranks. If a rank is slow, `late_rank` is its number and
    `late_ms` its delay in the steps in which it is late, most of it in `late_phase`.
    """
    check = getattr(getattr(ddp, "guard", None), "checks", {}).get("slow_rank")
    if not isinstance(check, SlowRank) or check.waited_ns is None:
        return {}
    fields: dict[str, Any] = {"waited_ms": check.waited_ns / 1e6}
    for late in check.late[:1]:
        fields |= {"late_rank": late.rank, "late_phase": late.phase, "late_ms": late.late_ns / 1e6}
    return fields


class MetricsLog:
    """`metrics.jsonl`: one JSON object per line, each with its `kind` and `step`. Also writes to --track."""

    def __init__(self, path: Path):
        self.path = path
        self.tracker: Any = None  # a SummaryWriter

    def append(self, **record: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        for name, value in record.items():
            if self.tracker is not None and isinstance(value, int | float) and name != "step":
                self.tracker.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def records(self, kind: str) -> list[dict[str, Any]]:
        every = map(json.loads, self.path.read_text().splitlines())
        return [record for record in every if record["kind"] == kind]

    def forget_after(self, step: int) -> None:
        """Drop records of later steps, which a resumed run writes again, and a line that was cut off."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        kept = [line for line in lines if line.endswith(b"}") and json.loads(line)["step"] <= step]
        write_atomically(self.path, lambda file: file.write(b"".join(line + b"\n" for line in kept)))


def open_tracker(settings: Settings) -> Any:
    """A SummaryWriter for --track, or None. Weights & Biases reads the files of TensorBoard."""
    if not settings.track:
        return None
    if "wandb" in settings.track:
        import wandb

        name = settings.folder.resolve().name
        wandb.init(project="minddp", id=name, dir=str(settings.folder), resume="allow", sync_tensorboard=True)
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(settings.folder / "tensorboard"))


def training_line(record: dict[str, Any], done: float, targets_are: str) -> str:
    """Format a training record for the terminal; `done` is the completed fraction of the run."""
    line = (
        f"{done:4.0%}  step {record['step']}  loss {record['loss']:.3f}  lr {record['learning_rate']:.2e}  "
        f"{record['targets_per_s']:,.0f} {targets_are}/s  {record['memory_mib']:,} MiB  "
        f"{record['tflops_per_s']:.2g} TFLOP/s"
    )
    if record["data_share"] >= 0.01:
        line += f"  waits {record['data_share']:.0%} for data"
    if "waited_ms" in record:
        line += f"  waits {record['waited_ms']:.1f} ms a step for gradients"
    if "late_rank" in record:
        line += f", for rank {record['late_rank']}: {record['late_ms']:.1f} ms {record['late_phase']}"
    if "loss_scale" in record:
        line += f"  loss scale {record['loss_scale']:g}"
    return line


def validation_line(step: int, means: Means, targets_are: str) -> str:
    """Format a validation for the terminal. Perplexity, exp(loss), is a number of equally likely choices."""
    return (
        f"step {step}  validation loss {means.loss:.3f}  perplexity {math.exp(min(means.loss, 700)):.2f}  "
        f"accuracy {means.accuracy:.1%} of {means.targets:,} {targets_are}"
    )
