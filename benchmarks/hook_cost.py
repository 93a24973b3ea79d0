"""What does one parameter cost per step when nothing is communicated?

    python -m benchmarks.hook_cost

One rank, 10,000 parameters of 4 elements. What a wrapper adds to forward and backward is then its bookkeeping
(hooks, counting, packing); divided by the number of parameters it is the cost of one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import contestants, machine
from benchmarks.contestants import FLOOR, SettingName
from benchmarks.harness import bootstrap_interval, median_ms, race, schedule, slowest_rank
from benchmarks.launch import run_ranks


@dataclass(frozen=True)
class Config:
    """Time what one parameter costs per step when nothing is communicated."""

    parameters: int = 10_000
    elements: int = 4
    """Of each parameter."""
    settings: tuple[SettingName, ...] = ("default", "views")
    """Constructor options, given to both implementations alike."""
    rounds: int = 20
    warmup_rounds: int = 2
    steps_per_turn: int = 2
    seed: int = 0
    control: bool = False
    """Put torch's class in minddp's seat: both should cost the same."""
    out: Path | None = None
    """JSON file to write; by default benchmarks/results/hook_cost.json (or hook_cost_control.json)."""
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for field in ("parameters", "elements", "rounds", "warmup_rounds", "steps_per_turn"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1.")

    def resolved(self) -> Config:
        """This configuration with the default of `out` spelled out."""
        name = "hook_cost_control.json" if self.control else "hook_cost.json"
        return dataclasses.replace(self, out=self.out or Path(__file__).parent / "results" / name)


class Separate(nn.Module):
    """Many small parameters whose sum costs one concatenation forward and one split backward."""

    def __init__(self, count: int, elements: int):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(elements) for _ in range(count))

    def forward(self) -> Tensor:
        return torch.cat(list(self.weights)).sum()


def main(config: Config) -> None:
    config = config.resolved()
    (report,) = run_ranks(time_parameters, config, world_size=1, threads=1, timeout_s=config.timeout_s)
    print_report(report, Console())
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text(json.dumps(report, indent=1) + "\n")


def time_parameters(rank: int, config: Config) -> dict[str, Any]:
    """Race all contestants; returns the report, ready for JSON."""
    models = contestants.build(Separate(config.parameters, config.elements), config.settings, config.control)
    steps = {name: forward_backward(model) for name, model in models.items()}
    order = schedule(contestants.heats(config.settings), config.warmup_rounds + config.rounds, config.seed)
    turns = race(steps, order, config.steps_per_turn, dist.barrier)
    seconds = slowest_rank([{name: turns[name][config.warmup_rounds :] for name in turns}])
    return {
        "question": "microseconds that one parameter adds to a step when nothing is communicated",
        "candidate": "control" if config.control else "minddp",
        "machine": machine.describe(),
        "config": {key: value for key, value in dataclasses.asdict(config).items() if key != "out"},
        "median_ms": {name: round(median_ms(seconds[name]), 4) for name in seconds},
        "us_per_parameter": {
            name: added_us(seconds[name] - seconds[FLOOR], config) for name in seconds if name != FLOOR
        },
    }


def forward_backward(model: nn.Module) -> Callable[[], None]:
    """A step without an optimizer, whose own cost per parameter would be the larger part."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model().backward()

    return step


def added_us(added_seconds: np.ndarray, config: Config) -> dict[str, float]:
    """What a wrapper adds per parameter: the median over the rounds, and its 95% bootstrap interval."""
    added = added_seconds / config.parameters * 1e6
    low, high = bootstrap_interval(added, config.seed)
    return {"median": float(np.median(added)), "low": low, "high": high}


def print_report(report: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{report['config']['parameters']} parameters, nothing communicated")
    table.add_column("contestant", no_wrap=True)
    for heading in ("ms per step", "µs per parameter", "95% interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, ms in report["median_ms"].items():
        label = name.replace("minddp", report["candidate"])
        added = report["us_per_parameter"].get(name)
        cells = (f"{added['median']:.2f}", f"{added['low']:.2f}–{added['high']:.2f}") if added else ()
        table.add_row(label, f"{ms:.2f}", *cells)
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Config))
