"""Is minddp's step as fast as torch's DistributedDataParallel, at equal settings?

    python -m benchmarks.versus_torch            # the measurement, about three minutes on two cores
    python -m benchmarks.versus_torch --quick    # a look
    python -m benchmarks.versus_torch --control  # torch's class in both seats: what the harness itself adds

Each workload is run without a wrapper, and at every setting by both implementations, in one process group.
See [Note: paired rounds] for how the ratio is taken.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from benchmarks import contestants, machine
from benchmarks.contestants import FLOOR, SettingName, candidate, native
from benchmarks.harness import Times, Turn, compare, fastest, mean_cpu, median_ms, race, schedule, slowest_rank
from benchmarks.launch import run_ranks
from benchmarks.workloads import Workload, WorkloadName, training_step, workload


@dataclass(frozen=True)
class Config:
    """Time a training step of minddp beside torch's DistributedDataParallel."""

    workloads: tuple[WorkloadName, ...] = ("many_small", "transformer", "wide_mlp")
    settings: tuple[SettingName, ...] = ("default", "views", "static", "batched", "views_static")
    """Constructor options, given to both implementations alike."""
    rounds: int = 36
    """Timed rounds; a multiple of twice the number of heats (the settings and the floor) is exactly fair."""
    warmup_rounds: int = 2
    """Rounds thrown away, in which the buckets are rebuilt."""
    steps_per_turn: int | None = None
    """Timed steps of one contestant's turn; by default the workload's own."""
    world_size: int = 2
    threads: int = 1
    """Compute threads of each rank."""
    seed: int = 0
    """Of the weights, the data, the order of turns and the bootstrap."""
    quick: bool = False
    """Fewer rounds and settings: a look instead of a measurement, written only where `out` says."""
    control: bool = False
    """Put torch's class in minddp's seat: every ratio should be 1."""
    out: Path | None = None
    """JSON file to write; by default benchmarks/results/versus_torch.json (or versus_torch_control.json)."""
    timeout_s: float = 900.0
    """Give up, and end the ranks, after this long."""

    def __post_init__(self) -> None:
        for field in ("rounds", "warmup_rounds", "world_size", "threads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1.")
        if self.steps_per_turn is not None and self.steps_per_turn < 1:
            raise ValueError(f"steps_per_turn is {self.steps_per_turn}; it must be at least 1.")
        if not self.workloads or not self.settings:
            raise ValueError("There is nothing to time; name at least one workload and one setting.")

    def resolved(self) -> Config:
        """This configuration with `quick` and the default of `out` spelled out."""
        if self.quick:
            settings: tuple[SettingName, ...] = tuple(
                name for name in self.settings if name in ("default", "views_static")
            )
            return dataclasses.replace(
                self, rounds=min(self.rounds, 8), warmup_rounds=1, settings=settings or self.settings[:1]
            )
        name = "versus_torch_control.json" if self.control else "versus_torch.json"
        return dataclasses.replace(self, out=self.out or Path(__file__).parent / "results" / name)


def main(config: Config) -> None:
    console = Console()
    config = without_unknown_settings(config.resolved(), console)
    load_average = machine.load_average()
    if load_average > 0.5:
        console.print(f"The machine is busy (load average {load_average:.1f}): expect a wide spread.")
    report, *_ = run_ranks(
        time_workloads,
        config,
        world_size=config.world_size,
        threads=config.threads,
        timeout_s=config.timeout_s,
    )
    report["machine"]["load_average_before"] = load_average
    print_report(report, console)
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text(json.dumps(report, indent=1) + "\n")


def without_unknown_settings(config: Config, console: Console) -> Config:
    """Leave out, and say so, the settings that this version of torch has no option for."""
    unknown = contestants.unknown_to_torch(config.settings)
    if unknown:
        console.print(f"Left out, as torch {torch.__version__} has no such option: {', '.join(unknown)}.")
    return dataclasses.replace(config, settings=tuple(s for s in config.settings if s not in unknown))


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """All workloads, one after another, on this rank; returns the report, ready for JSON."""
    with Progress(
        TextColumn("{task.description:12}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} rounds"),
        TimeElapsedColumn(),
        auto_refresh=False,  # a thread that draws would draw inside a timed turn
        disable=rank != 0,
    ) as progress:
        timed: dict[str, Any] = {
            name: time_workload(rank, workload(name), config, progress) for name in config.workloads
        }
    return {
        "question": "time per step of minddp's DistributedDataParallel as a multiple of torch's",
        "candidate": "control" if config.control else "minddp",
        "machine": machine.describe(),
        "config": {key: value for key, value in dataclasses.asdict(config).items() if key != "out"},
        "peak_memory_mib": round(machine.peak_memory_mib(), 1),
        "workloads": timed,
        "across_workloads": across_workloads(timed),
    }


def time_workload(rank: int, task: Workload, config: Config, progress: Progress) -> dict[str, Any]:
    """Race all contestants on one workload and summarise their turns."""
    torch.manual_seed(config.seed)
    models = contestants.build(task.model(), config.settings, config.control)
    steps = {name: training_step(model, task, rank) for name, model in models.items()}
    order = schedule(contestants.heats(config.settings), config.warmup_rounds + config.rounds, config.seed)
    bar = progress.add_task(task.name, total=len(order))

    def on_round() -> None:
        progress.advance(bar)
        progress.refresh()

    turns = race(steps, order, config.steps_per_turn or task.steps_per_turn, dist.barrier, on_round)
    timed = {name: turns[name][config.warmup_rounds :] for name in turns}
    turns_of_rank: list[Any] = [None] * config.world_size
    dist.all_gather_object(turns_of_rank, timed)
    same_bits: dict[str, bool] = {setting: equal_on_all_ranks(models, setting) for setting in config.settings}
    return describe_model(task, models[FLOOR]) | summarise(turns_of_rank, same_bits, config)


def equal_on_all_ranks(models: Mapping[str, nn.Module], setting: str) -> bool:
    """Whether torch's and minddp's model hold the same bits after the race: they have done the same work."""
    pairs = zip(models[native(setting)].parameters(), models[candidate(setting)].parameters(), strict=True)
    equal = torch.tensor(int(all(torch.equal(theirs, ours) for theirs, ours in pairs)))
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    return bool(equal)


def describe_model(task: Workload, model: nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "title": task.title,
        "tensors": len(parameters),
        "parameters": sum(p.numel() for p in parameters),
        "gradient_mib": round(sum(p.numel() * p.element_size() for p in parameters) / 2**20, 2),
    }


def summarise(
    turns_of_rank: Sequence[Mapping[str, Sequence[Turn]]], same_bits: Mapping[str, bool], config: Config
) -> dict[str, Any]:
    """Medians, paired ratios, and every single round so that they can be checked."""
    wall, cpu = slowest_rank(turns_of_rank), mean_cpu(turns_of_rank)

    def ratio(times: Times, numerator: str, denominator: str) -> dict[str, float]:
        return dataclasses.asdict(compare(times[numerator], times[denominator], config.seed))

    best_native = fastest(wall, [native(setting) for setting in config.settings])
    best_candidate = fastest(wall, [candidate(setting) for setting in config.settings])
    return {
        "median_ms": {name: round(median_ms(wall[name]), 4) for name in wall},
        "median_cpu_ms": {name: round(median_ms(cpu[name]), 4) for name in cpu},
        "ratios": {s: ratio(wall, candidate(s), native(s)) for s in config.settings},
        "cpu_ratios": {s: ratio(cpu, candidate(s), native(s)) for s in config.settings},
        "same_bits": dict(same_bits),
        "best": {
            "torch": best_native,
            "minddp": best_candidate,
            "ratio": ratio(wall, best_candidate, best_native),
            "cpu_ratio": ratio(cpu, best_candidate, best_native),
        },
        "rounds_ms": {name: [round(t * 1e3, 4) for t in wall[name]] for name in wall},
        "rounds_cpu_ms": {name: [round(t * 1e3, 4) for t in cpu[name]] for name in cpu},
    }


def across_workloads(timed: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """For each setting, the median and the worst of the workloads' ratios."""
    settings = next(iter(timed.values()))["ratios"]
    medians = {name: [result["ratios"][name]["median"] for result in timed.values()] for name in settings}
    return {name: {"median": float(np.median(values)), "worst": max(values)} for name, values in medians.items()}


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """One table for each workload, then what they say together."""
    for result in report["workloads"].values():
        console.print(_table(result, seat=report["candidate"]))
    console.print("Across workloads, time relative to torch at equal settings (median, worst):")
    for setting, figures in report["across_workloads"].items():
        console.print(f"  {setting:13} {figures['median']:.3f}x  {figures['worst']:.3f}x")


def _table(result: Mapping[str, Any], seat: str) -> Table:
    ms, best = result["median_ms"], result["best"]
    differ = [setting for setting, same in result["same_bits"].items() if not same]
    bits = f"parameters DIFFER at: {', '.join(differ)}" if differ else "parameters equal to the bit"
    table = Table(
        title=f"{result['title']}: {result['tensors']} tensors, {result['gradient_mib']} MiB",
        caption=f"no wrapper: {ms[FLOOR]:.2f} ms per step; {bits}",
    )
    table.add_column("setting", no_wrap=True)
    for heading in ("torch ms", f"{seat} ms", "ratio", "95% interval", "spread", "cpu"):
        table.add_column(heading, justify="right", no_wrap=True)
    for setting, ratio in result["ratios"].items():
        cpu_ratio = result["cpu_ratios"][setting]
        table.add_row(setting, *_cells(ms[native(setting)], ms[candidate(setting)], ratio, cpu_ratio))
    table.add_section()
    table.add_row("best of each", *_cells(ms[best["torch"]], ms[best["minddp"]], best["ratio"], best["cpu_ratio"]))
    return table


def _cells(
    torch_ms: float, candidate_ms: float, ratio: Mapping[str, float], cpu_ratio: Mapping[str, float]
) -> list[str]:
    return [
        f"{torch_ms:.2f}",
        f"{candidate_ms:.2f}",
        f"{ratio['median']:.3f}",
        f"{ratio['low']:.3f}–{ratio['high']:.3f}",
        f"{ratio['spread']:.3f}",
        f"{cpu_ratio['median']:.3f}",
    ]


if __name__ == "__main__":
    main(tyro.cli(Config))
