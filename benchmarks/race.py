"""The race of contestants on one workload."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.contestants import FLOOR, Contestant, whole
from benchmarks.display import progress
from benchmarks.harness import Estimate, Times, compare, estimate, in_ms, median_ms, timed_race
from benchmarks.question import RaceOptions
from benchmarks.workloads import Workload, device_of


@dataclass(frozen=True)
class Raced:
    """The contestants' models after a race, and their times. See [Note: paired rounds] for the estimates."""

    title: str
    models: Mapping[str, nn.Module]
    wall: Times
    seed: int  #: of the bootstrap

    def described(self) -> dict[str, Any]:
        """The model, and the milliseconds of every round."""
        parameters = list(next(iter(self.models.values())).parameters())
        return {
            "title": self.title,
            "tensors": len(parameters),
            "parameters": sum(p.numel() for p in parameters),
            "gradient_mib": round(sum(p.nbytes for p in parameters) / 2**20, 2),
            "rounds": len(next(iter(self.wall.values()))),
            "rounds_ms": in_ms(self.wall),
        }

    def median_ms(self, name: str) -> float:
        return median_ms(self.wall[name])

    def ratio(self, name: str, baseline: str) -> Estimate:
        return compare(self.wall[name], self.wall[baseline], self.seed)

    def figures(self, contestant: Contestant) -> dict[str, Any]:
        """The figures of one contestant; "exposed" is the time beyond the step without a wrapper. Collective."""
        name, baseline = contestant.name, contestant.baseline
        assert baseline is not None, "floors have no baseline"
        found = {
            "baseline": baseline,
            "median_ms": self.median_ms(name),
            "ratio": self.ratio(name, baseline),
            "same_bits": self.same_bits(contestant),
        }
        if FLOOR in self.wall:
            ours, theirs = (self.wall[each] - self.wall[FLOOR] for each in (name, baseline))
            found["exposed_ms"] = estimate(ours * 1e3, self.seed)
            found["exposed_ratio"] = compare(ours, theirs, self.seed)
        return found

    def same_bits(self, contestant: Contestant) -> bool:
        """True if it holds its baseline's weights on all ranks: both have done the same work. Collective."""
        assert contestant.baseline is not None, "floors have no baseline"
        pair = (self.models[name].parameters() for name in (contestant.name, contestant.baseline))
        differ = [not torch.equal(whole(ours), whole(theirs)) for ours, theirs in zip(*pair, strict=True)]
        everywhere = torch.tensor(int(not any(differ)), device=device_of(self.models[contestant.name]))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        return bool(everywhere)


def race_workload(
    rank: int,
    task: Workload,
    field: Sequence[Contestant],
    config: RaceOptions,
    device: str = "cpu",
) -> Raced:
    """Race all of `field`, each on a copy of the task's model. Collective."""
    torch.manual_seed(config.seed)
    models = enter(field, task.model().to(device))
    steps = {c.name: c.step(models[c.name], task, rank) for c in field}
    wall = timed_race(
        steps,
        heats(field),
        config.race_rounds,
        config.turn(task.steps_per_turn),
        partial(progress, task.name),
        settle=torch.cuda.synchronize if device == "cuda" else lambda: None,
        leave=lambda name: models[name].zero_grad(set_to_none=True),
    )
    return Raced(task.title, models, wall, config.seed)


def heats(contestants: Sequence[Contestant]) -> list[list[str]]:
    """Names by heat, in order."""
    by_heat: dict[str, list[str]] = {}
    for contestant in contestants:
        by_heat.setdefault(contestant.heat, []).append(contestant.name)
    return list(by_heat.values())


def enter(contestants: Sequence[Contestant], model: nn.Module) -> dict[str, nn.Module]:
    """The module of each: a wrapped copy of `model`, so that all start from the same weights. Collective."""
    return {contestant.name: contestant.wrap(copy.deepcopy(model)) for contestant in contestants}
