"""How long does a training step take beside torch's DistributedDataParallel, and beside what no wrapper can beat?

    python -m benchmarks.versus_torch                # the measurement, about ten minutes on two cores
    python -m benchmarks.versus_torch --size quick   # a look
    python -m benchmarks.versus_torch --control      # torch's class in both seats: what the harness itself adds

Each workload is trained by torch and by minddp at every setting, by other wrappers, and without one, all in one
process group. See [Note: paired rounds] for how the ratio is taken, and NOTES.md for how to read the table. What is
said of each follows from its rounds in `standings.py`; how that looks on a terminal is in `scoreboard.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from torch import nn

from benchmarks import contestants, machine, results
from benchmarks.contestants import FLOOR, Contestant, OtherName, SettingName, TransportName
from benchmarks.display import StartBar, console_of, progress_of
from benchmarks.harness import Rounds, estimate, timed_race
from benchmarks.launch import DeviceName, run_ranks
from benchmarks.question import RaceOptions
from benchmarks.scoreboard import print_report
from benchmarks.standings import Setup, across_workloads, best, figures, floors, in_ms
from benchmarks.workloads import Workload, WorkloadName, batch_of, workload

BARRIERS = 200


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time a training step of minddp beside torch's DistributedDataParallel."""

    LEAST = RaceOptions.LEAST | {"rounds": 2}

    workloads: tuple[WorkloadName, ...] = (
        "many_small",
        "transformer",
        "wide_mlp",
        "convnet",
        "embedding",
        "embedding_sparse",
    )
    settings: tuple[SettingName, ...] = ("default", "views", "static", "batched", "views_static")
    """Constructor options, given to both implementations alike."""
    transports: tuple[TransportName, ...] | None = None
    """How minddp's bytes travel; by default all three ways, and on a GPU by the process group."""
    others: tuple[OtherName, ...] = (
        "replicate",
        "naive",
        "flat",
        "overlapped",
        "bucketed",
        "automatic",
        "zero1",
    )
    """Other ways to train: torch's `replicate`, the rungs of the reference ladder, DeepSpeed's ZeRO-1."""
    rounds: int = 26
    """Timed rounds, at least; a multiple of twice the number of heats is exactly fair."""
    seconds: float = 60.0
    """A workload of short steps has so many times these rounds that they take about this long, too."""
    steps_per_turn: int | None = None
    """Timed steps of one contestant's turn; by default the workload's own."""
    device: DeviceName = "cpu"
    """With "cuda", a GPU for each rank, and NCCL."""
    size: Literal["full", "quick", "smoke"] = "full"
    """quick: fewer rounds, settings and others. smoke: tiny models too, to see that all runs. Both are written only
    where `out` says."""
    control: bool = False
    """Put torch's class in minddp's seat: every ratio should be 1."""
    out: Path | None = None
    """JSON file to write; by default benchmarks/results/versus_torch.json (or versus_torch_control.json)."""
    timeout_s: float = 3600.0
    """Give up, and end the ranks, after this long."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps_per_turn is not None and self.steps_per_turn < 1:
            raise ValueError(f"steps_per_turn is {self.steps_per_turn}; it must be at least 1.")
        if not self.workloads or not self.settings:
            raise ValueError("There is nothing to time; name at least one workload and one setting.")

    @property
    def race_rounds(self) -> Rounds:
        return dataclasses.replace(super().race_rounds, seconds=self.seconds)

    def resolved(self) -> Config:
        """This configuration with the meaning of `size` and all defaults spelled out."""
        everywhere: tuple[TransportName, ...] = ("process_group",)
        on_a_host: tuple[TransportName, ...] = ("process_group", "shared_memory", "auto")
        by_device = everywhere if self.device == "cuda" or self.control else on_a_host
        config = dataclasses.replace(self, transports=self.transports or by_device)
        if self.size == "full":
            name = "versus_torch_control" if self.control else "versus_torch"
            return dataclasses.replace(config, out=self.out or results.path_of(name))
        config = dataclasses.replace(config, seconds=0.0)
        if self.size == "smoke":
            return dataclasses.replace(config, rounds=2, warmup_rounds=1, steps_per_turn=1)
        quick = tuple(setting for setting in self.settings if setting in ("default", "views_static"))
        return dataclasses.replace(
            config, rounds=min(self.rounds, 8), settings=quick or self.settings[:1], others=()
        )


def main(config: Config) -> None:
    console = console_of()
    config = without_absentees(config.resolved(), console)
    load_average = machine.load_average()
    if load_average > 0.5:
        console.print(f"The machine is busy (load average {load_average:.1f}): expect a wide spread.")
    report, *_ = run_ranks(
        time_workloads,
        config,
        world_size=config.world_size,
        threads=config.threads,
        timeout_s=config.timeout_s,
        device=config.device,
    )
    report["machine"]["load_average_before"] = load_average
    print_report(report, console)
    if config.out is not None:
        results.write(report, config.out)


def without_absentees(config: Config, console: Console) -> Config:
    """Leave out, and say so, what the installed torch has no option for and what is not installed."""
    unknown = contestants.unknown_to_torch(config.settings)
    if unknown:
        console.print(f"Left out, as torch {torch.__version__} has no such option: {', '.join(unknown)}.")
    absent = contestants.not_installed(config.others)
    if absent:
        console.print(f"Left out, as DeepSpeed is not installed: {', '.join(absent)}.")
    return dataclasses.replace(
        config,
        settings=tuple(setting for setting in config.settings if setting not in unknown),
        others=tuple(name for name in config.others if name not in absent),
    )


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """All workloads, one after another, on this rank; returns the report, ready for JSON."""
    with progress_of(rank) as start_bar:
        timed: dict[str, Any] = {
            name: time_workload(rank, workload(name, tiny=config.size == "smoke"), config, start_bar)
            for name in config.workloads
        }
    return {
        "question": "time of a training step beside torch's DistributedDataParallel at equal settings",
        "seat": "control" if config.control else "minddp",
        "machine": machine.describe(config.device),
        "config": results.of_config(config),
        "peak_memory_mib": round(machine.peak_memory_mib(), 1),
        "barrier_us": barrier_us(config.seed),
        "workloads": timed,
        "across_workloads": across_workloads(timed),
    }


def time_workload(rank: int, task: Workload, config: Config, start_bar: StartBar) -> dict[str, Any]:
    """Race all contestants on one workload and summarise their turns."""
    torch.manual_seed(config.seed)
    assert config.transports is not None, "resolved"
    field = contestants.field(config.settings, config.transports, config.others, control=config.control)
    field = contestants.for_workload(field, task)
    models = contestants.enter(field, task.model().to(config.device))
    steps = {c.name: c.step(models[c.name], task, rank) for c in field}
    wall, cpu = timed_race(
        steps,
        contestants.heats(field),
        config.race_rounds,
        config.steps_per_turn or task.steps_per_turn,
        partial(start_bar, task.name),
        settle=torch.cuda.synchronize if config.device == "cuda" else lambda: None,
        leave=lambda name: models[name].zero_grad(set_to_none=True),
    )
    described = describe_workload(task, models[FLOOR])
    setup = Setup(config.world_size, described["examples_per_step"], config.seed)
    return described | {
        "rounds": len(wall[FLOOR]),
        "floors": floors(wall),
        "contestants": {
            c.name: figures(c, wall, cpu, setup) | {"same_bits": trained_alike(models, c)}
            for c in field
            if c.baseline
        },
        "best": best(field, wall, config.seed),
        "rounds_ms": in_ms(wall),
        "rounds_cpu_ms": in_ms(cpu),
    }


def describe_workload(task: Workload, model: nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "title": task.title,
        "tensors": len(parameters),
        "parameters": sum(p.numel() for p in parameters),
        "gradient_mib": round(sum(p.nbytes for p in parameters) / 2**20, 2),
        "examples_per_step": len(batch_of(task, 0, torch.device("cpu"))[0]),
    }


def trained_alike(models: Mapping[str, nn.Module], contestant: Contestant) -> bool:
    """Whether it holds the same bits as its baseline after the race, on all ranks: both have done the same work."""
    assert contestant.baseline is not None, "floors have no baseline"
    pairs = zip(models[contestant.name].parameters(), models[contestant.baseline].parameters(), strict=True)
    alike = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    everywhere = torch.tensor(int(alike), device=next(models[FLOOR].parameters()).device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere)


def barrier_us(seed: int) -> dict[str, Any]:
    """What it takes the ranks to meet. Collective."""
    took = []
    for _ in range(BARRIERS):
        start = time.perf_counter()
        dist.barrier()
        took.append((time.perf_counter() - start) * 1e6)
    return dataclasses.asdict(estimate(np.array(took[BARRIERS // 10 :]), seed))


if __name__ == "__main__":
    main(tyro.cli(Config))
