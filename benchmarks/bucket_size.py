"""How does a step depend on the size of the buckets, and does `bucket_cap_mb="auto"` find a good one?

    python -m benchmarks.bucket_size     # about four minutes on two cores

Small buckets leave early but pay a latency each; large ones leave late, and nothing hides the last one. Each
capacity is a heat of torch's class and minddp's, by the process group and by shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

from benchmarks import contestants, machine, results
from benchmarks.contestants import FLOOR, Contestant, minddp_over, wrapped_by
from benchmarks.display import StartBar, console_of, interval, progress_of, table_of
from benchmarks.harness import Times, compare, estimate, median_ms, race, schedule, timed_rounds
from benchmarks.launch import run_ranks
from benchmarks.workloads import WorkloadName, training_step, workload

FAMILIES = {
    "torch": NativeDDP,
    "minddp": minddp_over("process_group"),
    "minddp, shared memory": minddp_over("shared_memory"),
}
STEPS_UNTIL_TUNED = 32  # minddp.tune watches 11 steps before it changes the buckets and 11 after


@dataclass(frozen=True)
class Config:
    """Time a step at several sizes of buckets."""

    workloads: tuple[WorkloadName, ...] = ("transformer", "wide_mlp")
    caps_mib: tuple[float, ...] = (0.25, 1, 4, 16, 64)
    """Capacities of the buckets in MiB, the first one included; the default and "auto" come on top."""
    rounds: int = 16
    warmup_rounds: int = 2
    steps_per_turn: int | None = None
    """By default the workload's own."""
    world_size: int = 2
    threads: int = 1
    tiny: bool = False
    """Models of no size, to see that all runs."""
    seed: int = 0
    out: Path | None = None
    """JSON file to write; by default benchmarks/results/bucket_size.json."""
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        for field in ("rounds", "warmup_rounds", "world_size", "threads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1.")
        if not self.caps_mib or min(self.caps_mib) <= 0:
            raise ValueError(f"caps_mib is {self.caps_mib}; give at least one capacity, all above 0.")


def main(config: Config) -> None:
    report, *_ = run_ranks(
        time_workloads,
        config,
        world_size=config.world_size,
        threads=config.threads,
        timeout_s=config.timeout_s,
    )
    print_report(report, console_of())
    results.write(report, config.out or results.path_of("bucket_size"))


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """One race for each workload, on this rank; returns the report, ready for JSON."""
    with progress_of(rank) as start_bar:
        timed = {name: time_workload(rank, name, config, start_bar) for name in config.workloads}
    return {
        "question": "time of a step by the capacity of the buckets",
        "machine": machine.describe() | {"load_average": machine.load_average()},
        "config": results.of_config(config),
        "workloads": timed,
    }


def time_workload(rank: int, name: WorkloadName, config: Config, start_bar: StartBar) -> dict[str, Any]:
    torch.manual_seed(config.seed)
    task = workload(name, tiny=config.tiny)
    field = field_of(config.caps_mib)
    models = contestants.enter(field, task.model())
    steps = {c.name: training_step(models[c.name], task, rank) for c in field}
    for c in field:
        if c.heat == "auto":
            for _ in range(STEPS_UNTIL_TUNED):
                steps[c.name]()
    order = schedule(contestants.heats(field), config.warmup_rounds + config.rounds, config.seed)
    advance = start_bar(name, len(order))
    turns = race(steps, order, config.steps_per_turn or task.steps_per_turn, dist.barrier, advance)
    wall, _ = timed_rounds(turns, config.warmup_rounds)
    return {
        "title": task.title,
        "gradient_mib": sum(p.nbytes for p in models[FLOOR].parameters()) / 2**20,
        "no_wrapper_ms": median_ms(wall[FLOOR]),
        "families": {
            family: {
                heat: figures(models, wall, family, heat, config) for heat in heats_of(family, config.caps_mib)
            }
            for family in FAMILIES
        },
    }


def heats_of(family: str, caps_mib: tuple[float, ...]) -> list[str]:
    """The capacities that a family can be given: by default 1 and 25 MiB, fixed ones, or "auto"."""
    fixed = ["default", *(f"{cap:g}" for cap in caps_mib)]
    return fixed if family == "torch" else [*fixed, "auto"]


def options_of(heat: str) -> dict[str, Any]:
    if heat == "default":
        return {}
    return {"bucket_cap_mb": heat if heat == "auto" else float(heat)}


def seat(family: str, heat: str) -> str:
    return f"{family} at {heat}"


def torch_beside(heat: str) -> str:
    """With whom the time is compared: torch at the same capacity; what chooses its own, with torch's default."""
    return seat("torch", "default" if heat == "auto" else heat)


def field_of(caps_mib: tuple[float, ...]) -> list[Contestant]:
    """No wrapper, then all families at each capacity."""
    return [
        Contestant(FLOOR, "floors"),
        *(
            Contestant(seat(family, heat), heat, torch_beside(heat), wrapped_by(FAMILIES[family], options_of(heat)))
            for heat in heats_of("minddp", caps_mib)
            for family in FAMILIES
            if heat in heats_of(family, caps_mib)
        ),
    ]


def figures(models: Mapping[str, nn.Module], wall: Times, family: str, heat: str, config: Config) -> dict[str, Any]:
    """Of one family at one capacity."""
    name = seat(family, heat)
    plan = getattr(models[name], "plan", None)
    return {
        "median_ms": dataclasses.asdict(estimate(wall[name] * 1e3, config.seed)),
        "over_no_wrapper": dataclasses.asdict(compare(wall[name], wall[FLOOR], config.seed)),
        "ratio": dataclasses.asdict(compare(wall[name], wall[torch_beside(heat)], config.seed)),
        "buckets": len(plan.buckets) if plan is not None else None,
    }


def print_report(report: Mapping[str, Any], console: Console) -> None:
    for result in report["workloads"].values():
        rows = table_of(
            f"{result['title']}: {result['gradient_mib']:.2f} MiB",
            "family",
            *("bucket MiB", "buckets", "ms", "95% interval", "over no wrapper", "ratio to torch", "95% interval"),
            caption=f"no wrapper: {result['no_wrapper_ms']:.2f} ms",
        )
        for family, by_heat in result["families"].items():
            for heat, figured in by_heat.items():
                beside_torch = [f"{figured['ratio']['median']:.3f}", interval(figured["ratio"])]
                rows.add_row(
                    family,
                    heat,
                    str(figured["buckets"] or ""),
                    f"{figured['median_ms']['median']:.2f}",
                    interval(figured["median_ms"], digits=2),
                    f"{figured['over_no_wrapper']['median']:.3f}",
                    *([] if family == "torch" else beside_torch),
                )
            rows.add_section()
        console.print(rows)


if __name__ == "__main__":
    main(tyro.cli(Config))
