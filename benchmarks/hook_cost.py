"""What does one parameter cost per step when nothing is communicated, and does that depend on how many there are?

    python -m benchmarks.hook_cost     # about a minute

One rank, up to 10,000 parameters of 4 elements. What a wrapper adds to forward and backward is then its bookkeeping
(hooks, counting, packing); divided by the number of parameters it is the cost of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from torch import Tensor, nn

from benchmarks import contestants, machine, results
from benchmarks.contestants import FLOOR, Contestant, SettingName
from benchmarks.display import StartBar, console_of, interval, progress_of, table_of
from benchmarks.harness import Rounds, compare, estimate, median_ms, timed_race
from benchmarks.launch import run_ranks
from benchmarks.question import refuse_less_than


@dataclass(frozen=True)
class Config:
    """Time what one parameter costs per step when nothing is communicated."""

    parameters: tuple[int, ...] = (100, 1_000, 10_000)
    elements: int = 4
    """Of each parameter."""
    settings: tuple[SettingName, ...] = ("default", "views")
    """Constructor options, given to both implementations alike."""
    rounds: int = 20
    warmup_rounds: int = 2
    turn_parameters: int = 20_000
    """How many parameters a turn gets through, at least; that makes its number of steps."""
    seed: int = 0
    control: bool = False
    """Put torch's class in minddp's seat: both should cost the same."""
    out: Path | None = None
    """JSON file to write; by default benchmarks/results/hook_cost.json (or hook_cost_control.json)."""
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        refuse_less_than({"elements": 1, "rounds": 1, "warmup_rounds": 1, "turn_parameters": 1}, self)
        if not self.parameters or min(self.parameters) < 1:
            raise ValueError(f"parameters is {self.parameters}; give at least one number, all at least 1.")

    def resolved(self) -> Config:
        """This configuration with the default of `out` spelled out."""
        name = "hook_cost_control" if self.control else "hook_cost"
        return dataclasses.replace(self, out=self.out or results.path_of(name))


class Separate(nn.Module):
    """Many small parameters whose sum costs one concatenation forward and one split backward."""

    def __init__(self, count: int, elements: int):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(elements) for _ in range(count))

    def forward(self) -> Tensor:
        return torch.cat(list(self.weights)).sum()


def main(config: Config) -> None:
    config = config.resolved()
    (report,) = run_ranks(time_counts, config, world_size=1, threads=1, timeout_s=config.timeout_s)
    print_report(report, console_of())
    if config.out is not None:
        results.write(report, config.out)


def time_counts(rank: int, config: Config) -> dict[str, Any]:
    """One race for each number of parameters; returns the report, ready for JSON."""
    with progress_of(rank) as start_bar:
        counts = {str(count): time_count(count, config, start_bar) for count in config.parameters}
    return {
        "question": "microseconds that one parameter adds to a step when nothing is communicated",
        "seat": "control" if config.control else "minddp",
        "machine": machine.describe(),
        "config": results.of_config(config),
        "counts": counts,
    }


def time_count(count: int, config: Config, start_bar: StartBar) -> dict[str, Any]:
    field = [
        Contestant(FLOOR, "floors"),
        *contestants.pairs(config.settings, ["process_group"], control=config.control),
    ]
    models = contestants.enter(field, Separate(count, config.elements))
    steps = {name: forward_backward(model) for name, model in models.items()}
    rounds = Rounds(config.rounds, config.warmup_rounds, config.seed)
    steps_per_turn = max(2, config.turn_parameters // count)
    bar = partial(start_bar, f"{count:,} parameters")
    wall, _ = timed_race(steps, contestants.heats(field), rounds, steps_per_turn, bar)

    def added_us(name: str) -> np.ndarray:
        return (wall[name] - wall[FLOOR]) / count * 1e6

    return {
        "no_wrapper_ms": median_ms(wall[FLOOR]),
        "contestants": {
            c.name: {
                "baseline": c.baseline,
                "median_ms": median_ms(wall[c.name]),
                "added_us": dataclasses.asdict(estimate(added_us(c.name), config.seed)),
                "ratio": dataclasses.asdict(compare(wall[c.name], wall[c.baseline], config.seed)),
            }
            for c in field
            if c.baseline
        },
    }


def forward_backward(model: nn.Module) -> Callable[[], None]:
    """A step without an optimizer, whose own cost per parameter would be the larger part."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model().backward()

    return step


def print_report(report: Mapping[str, Any], console: Console) -> None:
    rows = table_of(
        "One rank, nothing communicated",
        "contestant",
        *("parameters", "ms per step", "added µs per parameter", "95% interval", "ratio", "95% interval"),
    )
    for count, result in report["counts"].items():
        rows.add_row(FLOOR, f"{int(count):,}", f"{result['no_wrapper_ms']:.3f}")
        for name, contestant in result["contestants"].items():
            added, ratio = contestant["added_us"], contestant["ratio"]
            beside_torch = [] if name == contestant["baseline"] else [f"{ratio['median']:.3f}", interval(ratio)]
            rows.add_row(
                name.replace("minddp", report["seat"]),
                f"{int(count):,}",
                f"{contestant['median_ms']:.3f}",
                f"{added['median']:.2f}",
                interval(added, digits=2),
                *beside_torch,
            )
        rows.add_section()
    console.print(rows)


if __name__ == "__main__":
    main(tyro.cli(Config))
