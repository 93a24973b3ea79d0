"""How long does a training step take beside torch's DistributedDataParallel, and beside what no wrapper can beat?

    python -m benchmarks.versus_torch                # the measurement, about ten minutes on two cores
    python -m benchmarks.versus_torch --size quick   # a look
    python -m benchmarks.versus_torch --control      # torch's class in both seats: what the harness itself adds

Each workload is trained by torch and by minddp at every setting, by other wrappers, and without one, all in one
process group. See [Note: paired rounds] for how the ratio is taken, and NOTES.md for how to read the table.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import contestants, machine, results
from benchmarks.contestants import ALONE, FLOOR, Contestant, OtherName, SettingName, TransportName, wire
from benchmarks.display import StartBar, console_of, interval, progress_of, table_of
from benchmarks.harness import Times, compare, estimate, fastest, median_ms, race, schedule, timed_rounds
from benchmarks.launch import DeviceName, run_ranks
from benchmarks.workloads import Workload, WorkloadName, batch_of, workload

BARRIERS = 200


@dataclass(frozen=True)
class Config:
    """Time a training step of minddp beside torch's DistributedDataParallel."""

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
    """Timed rounds; a multiple of twice the number of heats is exactly fair."""
    warmup_rounds: int = 2
    """Rounds thrown away, in which the buckets are rebuilt."""
    steps_per_turn: int | None = None
    """Timed steps of one contestant's turn; by default the workload's own."""
    world_size: int = 2
    threads: int = 1
    """Compute threads of each rank."""
    device: DeviceName = "cpu"
    """With "cuda", a GPU for each rank, and NCCL."""
    seed: int = 0
    """Of the weights, the data, the order of turns and the bootstrap."""
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
        for field, least in {"rounds": 2, "warmup_rounds": 1, "world_size": 1, "threads": 1}.items():
            if getattr(self, field) < least:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least {least}.")
        if self.steps_per_turn is not None and self.steps_per_turn < 1:
            raise ValueError(f"steps_per_turn is {self.steps_per_turn}; it must be at least 1.")
        if not self.workloads or not self.settings:
            raise ValueError("There is nothing to time; name at least one workload and one setting.")

    def resolved(self) -> Config:
        """This configuration with the meaning of `size` and all defaults spelled out."""
        everywhere: tuple[TransportName, ...] = ("process_group",)
        on_a_host: tuple[TransportName, ...] = ("process_group", "shared_memory", "auto")
        by_device = everywhere if self.device == "cuda" or self.control else on_a_host
        config = dataclasses.replace(self, transports=self.transports or by_device)
        if self.size == "full":
            name = "versus_torch_control" if self.control else "versus_torch"
            return dataclasses.replace(config, out=self.out or results.path_of(name))
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


# ------------------------------------------------------------------ on each rank


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
    order = schedule(contestants.heats(field), config.warmup_rounds + config.rounds, config.seed)
    turns = race(
        steps,
        order,
        config.steps_per_turn or task.steps_per_turn,
        dist.barrier,
        start_bar(task.name, len(order)),
        torch.cuda.synchronize if config.device == "cuda" else lambda: None,
        leave=lambda name: models[name].zero_grad(set_to_none=True),
    )
    wall, cpu = timed_rounds(turns, config.warmup_rounds)
    return describe_workload(task, models[FLOOR]) | {
        "floors": floors(wall),
        "contestants": {
            c.name: figures(c, wall, cpu, task, config) | {"same_bits": trained_alike(models, c)}
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


# ------------------------------------------------------------------ arithmetic


def floors(wall: Times) -> dict[str, Any]:
    """Milliseconds per step that no wrapper can beat, and what makes them up."""
    return {
        "one_rank_alone_ms": median_ms(wall[ALONE]),
        "no_wrapper_ms": median_ms(wall[FLOOR]),
        "all_reduce_ms": {t: median_ms(wall[wire(t)]) for t in measured_wires(wall)},
        "floor_ms": {t: median_ms(floor_of(wall, t)) for t in measured_wires(wall)},
    }


def measured_wires(wall: Times) -> list[str]:
    return [t for t in ("process_group", "shared_memory") if wire(t) in wall]


def floor_of(wall: Times, transport: str) -> np.ndarray:
    """max(compute, bytes / bandwidth), round by round: all hidden that can be.

    "auto" may have chosen any transport, so its floor is the lower one.
    """
    wires = [wall[wire(t)] for t in measured_wires(wall) if transport in (t, "auto")]
    return np.maximum(wall[FLOOR], np.min(wires, axis=0)) if wires else wall[FLOOR]


def figures(contestant: Contestant, wall: Times, cpu: Times, task: Workload, config: Config) -> dict[str, Any]:
    """All that is said of one contestant; each estimate is paired round by round."""
    name, baseline = contestant.name, contestant.baseline
    assert baseline is not None, "floors have no baseline"
    compared = partial(compare, seed=config.seed)
    examples = config.world_size * len(batch_of(task, 0, torch.device("cpu"))[0])
    speedup = compared(config.world_size * wall[ALONE], wall[name])
    return {
        "baseline": baseline,
        "median_ms": median_ms(wall[name]),
        "median_cpu_ms": median_ms(cpu[name]),
        "examples_per_s": examples / float(np.median(wall[name])),
        "ratio": dataclasses.asdict(compared(wall[name], wall[baseline])),
        "cpu_ratio": dataclasses.asdict(compared(cpu[name], cpu[baseline])),
        "exposed_ms": dataclasses.asdict(estimate((wall[name] - wall[FLOOR]) * 1e3, config.seed)),
        "over_floor": dataclasses.asdict(compared(wall[name], floor_of(wall, contestant.transport))),
        "speedup": dataclasses.asdict(speedup),
        "efficiency": speedup.median / config.world_size,
    }


def best(field: Sequence[Contestant], wall: Times, seed: int) -> dict[str, Any]:
    """minddp's fastest against torch's fastest, over the process group and over any transport.

    They are chosen in every other round and timed in the rest, or luck would choose them and then be reported.
    """
    choosing = {name: seconds[::2] for name, seconds in wall.items()}
    natives = [c.name for c in field if c.name == c.baseline]
    of_transport = {
        transport: [c.name for c in field if c.name.startswith("minddp ") and transport in (c.transport, "any")]
        for transport in ("process_group", "any")
    }
    theirs = fastest(choosing, natives)
    found = {}
    for transport, names in of_transport.items():
        if names:
            ours = fastest(choosing, names)
            ratio = dataclasses.asdict(compare(wall[ours][1::2], wall[theirs][1::2], seed))
            found[transport] = {"torch": theirs, "minddp": ours, "ratio": ratio}
    return found


def across_workloads(timed: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """For each contestant in minddp's seat, the median and the worst of the workloads' ratios."""
    medians: dict[str, list[float]] = {}
    for result in timed.values():
        for name, contestant in result["contestants"].items():
            if name.startswith("minddp "):
                medians.setdefault(name, []).append(contestant["ratio"]["median"])
    return {name: {"median": float(np.median(values)), "worst": max(values)} for name, values in medians.items()}


def in_ms(times: Times) -> dict[str, list[float]]:
    return {name: [round(seconds * 1e3, 4) for seconds in times[name]] for name in times}


# ------------------------------------------------------------------ on the terminal


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """One table for each workload, then what they say together."""
    for result in report["workloads"].values():
        console.print(table(result, report["seat"]))
        console.print(f"  {floors_in_words(result['floors'])}; {weights_in_words(result['contestants'])}.")
        for transport, pair in result["best"].items():
            console.print(
                f"  best by {transport.replace('_', ' ')}: {pair['minddp']} against {pair['torch']}: "
                f"{pair['ratio']['median']:.3f} ({interval(pair['ratio'])})"
            )
    console.print(f"A barrier takes {report['barrier_us']['median']:.0f} µs.")
    console.print("Across workloads, time relative to torch at equal settings (median, worst):")
    for name, across in report["across_workloads"].items():
        console.print(f"  {name:32} {across['median']:.3f}x  {across['worst']:.3f}x")


def table(result: Mapping[str, Any], seat: str) -> Table:
    rows = table_of(
        f"{result['title']}: {result['tensors']} tensors, {result['gradient_mib']} MiB",
        "contestant",
        *("ms", "ratio", "95% interval", "spread", "cpu", "exposed ms", "over floor", "speed-up", "examples/s"),
    )
    baseline = None
    for name, contestant in result["contestants"].items():
        if contestant["baseline"] != baseline:
            baseline = contestant["baseline"]
            rows.add_section()
        rows.add_row(name.replace("minddp", seat), *_cells(contestant, is_baseline=name == baseline))
    return rows


def floors_in_words(floors: Mapping[str, Any]) -> str:
    wires = ", ".join(f"by {t.replace('_', ' ')} {ms:.2f}" for t, ms in floors["all_reduce_ms"].items())
    alone, bare = floors["one_rank_alone_ms"], floors["no_wrapper_ms"]
    return f"ms per step: {ALONE} {alone:.2f}, {FLOOR} {bare:.2f}, all-reduce only {wires}"


def weights_in_words(contestants: Mapping[str, Any]) -> str:
    differ = [name for name, contestant in contestants.items() if not contestant["same_bits"]]
    return f"weights DIFFER from torch's: {', '.join(differ)}" if differ else "all weights equal to the bit"


def _cells(contestant: Mapping[str, Any], *, is_baseline: bool) -> list[str]:
    ratio = contestant["ratio"]
    beside_torch = [
        f"{ratio['median']:.3f}",
        interval(ratio),
        f"{ratio['spread']:.3f}",
        f"{contestant['cpu_ratio']['median']:.3f}",
    ]
    return [
        f"{contestant['median_ms']:.2f}",
        *([""] * 4 if is_baseline else beside_torch),
        f"{contestant['exposed_ms']['median']:.2f}",
        f"{contestant['over_floor']['median']:.2f}",
        f"{contestant['speedup']['median']:.2f}",
        f"{contestant['examples_per_s']:.0f}",
    ]


if __name__ == "__main__":
    main(tyro.cli(Config))
