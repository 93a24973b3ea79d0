"""The first steps of a run with torch's DDP and with minddp's: compare all bits and the time.

`python -m minddp.train.compare`, started by a launcher, is one rank of the comparison. Both wrappers train
models of their own from the same seed in the same processes, taking turns of a few steps, so that whatever
else the machine is doing hits both alike.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from minddp.train.settings import Settings
from minddp.train.trainer import Trainer
from minddp.train.world import World, open_world

WRAPPERS: tuple[Literal["torch"], Literal["minddp"]] = ("torch", "minddp")


@dataclass(frozen=True)
class CompareSettings:
    """Compare the first steps of training under torch's DDP and under minddp's."""

    out: Path
    """JSON file for the result."""
    turns: int = 12
    """Turns of each wrapper; the first is not timed, since the buckets are made in it."""
    steps_per_turn: int = 4
    """Optimizer steps per turn."""


@dataclass(frozen=True)
class Comparison:
    """The result; `step_ms` holds a mean per timed turn, on rank 0."""

    steps: int
    ranks: int
    parameters: int
    differences: list[str]  # where, on which rank; empty if all bits are equal
    step_ms: dict[str, list[float]]
    targets_per_step: int
    plan: str

    @property
    def ratio(self) -> float:
        """minddp's time over torch's, median over pairs of neighbouring turns."""
        pairs = zip(self.step_ms["minddp"], self.step_ms["torch"], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def median_ms(self, wrapper: str) -> float:
        return statistics.median(self.step_ms[wrapper])

    def targets_per_s(self, wrapper: str) -> float:
        return self.targets_per_step / self.median_ms(wrapper) * 1000

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Comparison:
        return cls(**json.loads(path.read_text()))


class Contestant:
    """A model in training under one of the wrappers, with its losses and times."""

    def __init__(self, settings: Settings, world: World):
        self.trainer = Trainer(settings, world)
        self.batches = iter(self.trainer.batches)
        self.losses: list[str] = []  # of each step, with all bits: float.hex
        self.step_ms: list[float] = []  # of each turn

    def take_turn(self, steps: int) -> None:
        """`steps` optimizer steps. Collective."""
        dist.barrier(group=self.trainer.world.control)
        began = time.perf_counter()
        for _ in range(steps):
            self.losses.append(float(self.trainer.optimizer_step(self.batches)).hex())
        self.step_ms.append((time.perf_counter() - began) * 1000 / steps)


def compare(settings: Settings, world: World, turns: int, steps_per_turn: int) -> Comparison:
    """Train under each wrapper for `turns` turns. Collective; every rank returns its own timings."""
    contestants = {wrapper: Contestant(dataclasses.replace(settings, ddp=wrapper), world) for wrapper in WRAPPERS}
    for turn in range(turns):
        order = WRAPPERS if turn % 2 == 0 else WRAPPERS[::-1]  # neither always goes first
        for wrapper in order:
            contestants[wrapper].take_turn(steps_per_turn)

    theirs, ours = (contestants[wrapper] for wrapper in WRAPPERS)
    found: list[list[str]] = [[] for _ in range(world.size)]
    dist.all_gather_object(found, differences(theirs, ours), group=world.control)
    model = ours.trainer.model
    return Comparison(
        steps=turns * steps_per_turn,
        ranks=world.size,
        parameters=sum(param.numel() for param in model.parameters()),
        differences=[f"rank {rank}: {where}" for rank, places in enumerate(found) for where in places],
        step_ms={wrapper: contestants[wrapper].step_ms[1:] for wrapper in WRAPPERS},
        targets_per_step=settings.batch_size * settings.accumulate * settings.gpt.context * world.size,
        plan=str(getattr(ours.trainer.ddp, "plan", "")),
    )


def differences(theirs: Contestant, ours: Contestant) -> list[str]:
    """Where two contestants differ first on this rank; empty if they do not."""
    found = []
    pairs = zip(theirs.losses, ours.losses, strict=True)
    parted = [step for step, (their_loss, our_loss) in enumerate(pairs) if their_loss != our_loss]
    if parted:
        found.append(f"the loss of step {parted[0]}")
    our_state = ours.trainer.model.state_dict()
    for name, their_tensor in theirs.trainer.model.state_dict().items():
        if digest(their_tensor) != digest(our_state[name]):
            found.append(f"{name} after the last step")
    return found


def digest(tensor: Tensor) -> str:
    """A hash of the tensor's bits; unlike `torch.equal`, it distinguishes 0.0 from -0.0."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def main() -> None:
    """Be one rank of the comparison."""
    chosen = tyro.cli(CompareSettings)
    settings = Settings(device="cpu")
    with open_world(settings) as world:
        comparison = compare(settings, world, chosen.turns, chosen.steps_per_turn)
        if world.is_main:
            comparison.save(chosen.out)


if __name__ == "__main__":
    main()
