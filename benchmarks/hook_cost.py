"""What does one parameter cost per step when nothing is communicated, and does that depend on how many there are?

    python -m benchmarks.hook_cost     # about two minutes

One rank, up to 10,000 parameters of 4 elements. The time that a wrapper adds to forward and backward is then its
bookkeeping (hooks, counting, packing); divided by the number of parameters it is the cost of one. It is taken for
each mode of counting: all parameters, views, `find_unused_parameters`, and a static graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch import Tensor, nn

from benchmarks import contestants
from benchmarks.contestants import FLOOR, Contestant, SettingName, race_workload
from benchmarks.display import RATIO, StartBar, Table, progress_of, table_of
from benchmarks.harness import estimate
from benchmarks.question import RaceOptions, Report, ask, report_of
from benchmarks.workloads import Workload

TURN_PARAMETERS = 20_000  # a turn has so many steps that they get through as many parameters


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time what one parameter costs per step when nothing is communicated."""

    LEAST = RaceOptions.LEAST | {"elements": 1}

    parameters: tuple[int, ...] = (100, 1_000, 10_000)
    elements: int = 4
    """Numbers in each parameter."""
    settings: tuple[SettingName, ...] = ("default", "views", "find_unused", "static")
    """Constructor options, given to both implementations alike."""
    world_size: int = 1
    """With 1, nothing is communicated."""
    rounds: int = 20
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.parameters or min(self.parameters) < 1:
            raise ValueError(f"parameters is {self.parameters}; give at least one number, all at least 1.")


class Separate(nn.Module):
    """Many small parameters whose sum costs one concatenation forward and one split backward."""

    def __init__(self, count: int, elements: int):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(elements) for _ in range(count))

    def forward(self) -> Tensor:
        return torch.cat(list(self.weights)).sum()


def main(config: Config) -> None:
    ask("hook_cost", time_counts, config, tables)


def time_counts(rank: int, config: Config) -> dict[str, Any]:
    """One race for each number of parameters; returns the report."""
    with progress_of(rank) as start_bar:
        counts = {str(count): time_count(rank, count, config, start_bar) for count in config.parameters}
    return report_of(
        "microseconds that one parameter adds to a step when nothing is communicated", config, counts=counts
    )


def time_count(rank: int, count: int, config: Config, start_bar: StartBar) -> dict[str, Any]:
    pairs = contestants.pairs(config.settings, ["process_group"])
    field = [dataclasses.replace(c, step=forward_backward) for c in (Contestant(FLOOR, "floors"), *pairs)]
    task = separate(count, config.elements)
    raced = race_workload(rank, task, field, config, start_bar)
    return {
        "no_wrapper_ms": raced.median_ms(FLOOR),
        "contestants": {
            c.name: {
                "baseline": c.baseline,
                "median_ms": raced.median_ms(c.name),
                "added_us": estimate((raced.wall[c.name] - raced.wall[FLOOR]) / count * 1e6, config.seed),
                "ratio": raced.ratio(c.name, c.baseline),
            }
            for c in field
            if c.baseline
        },
    }


def separate(count: int, elements: int) -> Workload:
    return Workload(
        f"{count:,} parameters",
        f"{count:,} parameters",
        lambda: Separate(count, elements),
        batch=lambda rng: (torch.empty(0), torch.empty(0)),
        loss=lambda output, target: output,
        learning_rate=0.0,
        steps_per_turn=max(2, TURN_PARAMETERS // count),
    )


def forward_backward(model: nn.Module, task: Workload, rank: int) -> Callable[[], None]:
    """A step without an optimizer, whose own cost per parameter would be the larger part."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model().backward()

    return step


def tables(report: Report) -> Iterator[Table]:
    added = "{added_us[median]:.2f} ({added_us[low]:.2f}–{added_us[high]:.2f})"
    columns = {"ms per step": "{median_ms:.3f}", "added µs per parameter": added, "ratio": RATIO}
    for count, result in report["counts"].items():
        title = f"{int(count):,} parameters, nothing communicated"
        caption = f"{FLOOR}: {result['no_wrapper_ms']:.3f} ms"
        yield table_of(title, "contestant", columns, result["contestants"], caption)


if __name__ == "__main__":
    main(tyro.cli(Config))
