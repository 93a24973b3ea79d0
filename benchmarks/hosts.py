"""How long does a step take on two hosts with a slow network between them, beside torch's DDP on the same two?

    sudo python -m benchmarks.hosts                  # 1 Gbit/s, two ranks on each; about ten minutes on two cores
    sudo python -m benchmarks.hosts --rate 10gbit
    sudo python -m benchmarks.hosts --size smoke     # to see that all runs

The hosts are network namespaces (see `namespaces.py`), made at the beginning and removed at the end. All ranks
share this machine's cores, which two hosts would not, so what is not waiting for the network takes longer here than
there. What the network takes is told apart from that: [Note: the floor of the wire].

[Note: the floor of the wire] For N bytes of gradients, however they are added up, N bytes must leave each of two
hosts; over a flat ring 2 (W-1)/W N bytes do, W being the number of ranks. Divided by the rate of the cable that is
a time that a step cannot beat. Neither can it beat its own computing. What it takes beyond that is exposed.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
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
from torch.nn.parallel import DistributedDataParallel as NativeDDP

from benchmarks import contestants, machine, results
from benchmarks.contestants import BASELINE, FLOOR, Contestant, minddp_over, wire, wrapped_by
from benchmarks.display import StartBar, console_of, interval, progress_of, table_of
from benchmarks.harness import Times, compare, estimate, median_ms, race, schedule, timed_rounds
from benchmarks.launch import run_ranks
from benchmarks.namespaces import INTERFACE, Host, bytes_per_second, two_hosts
from benchmarks.workloads import WorkloadName, workload

HOSTS = 2
TRANSPORTS = ("process_group", "hierarchical")
STEPS_UNTIL_TUNED = 32  # minddp.forecast watches 11 steps before it changes the buckets and 11 after
AIM = {"rate": "1gbit", "contestant": "minddp hierarchical, auto", "ratio": 0.95}  # at most, in every workload
_PORT = 29500
_PROBE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Config:
    """Time a training step on two hosts that are connected by a cable of a certain rate."""

    rate: str = "1gbit"
    """Of the cable in each direction: a number of kbit, mbit or gbit."""
    workloads: tuple[WorkloadName, ...] = ("many_small", "transformer", "wide_mlp", "convnet")
    ranks_per_host: int = 2
    rounds: int = 12
    """Timed rounds."""
    warmup_rounds: int = 1
    steps_per_turn: int | None = None
    """By default the workload's own."""
    threads: int = 1
    """Compute threads of each rank."""
    seed: int = 0
    size: Literal["full", "smoke"] = "full"
    """smoke: tiny models and two rounds; written only where `out` says."""
    out: Path | None = None
    """JSON file to write; by default benchmarks/results/hosts_RATE.json."""
    timeout_s: float = 3600.0
    """Give up, and end the ranks, after this long."""

    def __post_init__(self) -> None:
        for field in ("ranks_per_host", "rounds", "warmup_rounds", "threads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1.")
        bytes_per_second(self.rate)

    @property
    def world_size(self) -> int:
        return HOSTS * self.ranks_per_host

    def resolved(self) -> Config:
        """This configuration with the meaning of `size` spelled out."""
        if self.size == "smoke":
            return dataclasses.replace(self, rounds=2, warmup_rounds=1, steps_per_turn=1)
        return dataclasses.replace(self, out=self.out or results.path_of(f"hosts_{self.rate}"))


def main(config: Config) -> None:
    config, console = config.resolved(), console_of()
    load_average = machine.load_average()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or it warns of addresses that have no names
    with two_hosts(config.rate) as hosts:
        report, *_ = run_ranks(
            time_workloads,
            config,
            world_size=config.world_size,
            threads=config.threads,
            timeout_s=config.timeout_s,
            settle=partial(settle, hosts, config.ranks_per_host),
        )
    report["machine"] |= {"load_average_before": load_average, "load_average_after": machine.load_average()}
    print_report(report, console)
    if config.out is not None:
        results.write(report, config.out)


# ------------------------------------------------------------------ on each rank


def settle(hosts: Sequence[Host], ranks_per_host: int, rank: int) -> str:
    """Move to the rank's host; returns where all meet."""
    hosts[rank // ranks_per_host].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return f"tcp://{hosts[0].address}:{_PORT}"


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """All workloads, one after another, on this rank; returns the report, ready for JSON."""
    with progress_of(rank) as start_bar:
        wire_bytes_per_s = probe(rank, config)
        timed: dict[str, Any] = {n: time_workload(rank, n, config, start_bar) for n in config.workloads}
    return {
        "question": "time of a training step on two hosts beside torch's DistributedDataParallel there",
        "machine": machine.describe(),
        "config": results.of_config(config),
        "wire": {"rate_bytes_per_s": bytes_per_second(config.rate), "measured_bytes_per_s": wire_bytes_per_s},
        "workloads": timed,
        "across_workloads": across_workloads(timed),
        "aim": AIM,
    }


def probe(rank: int, config: Config) -> float:
    """Bytes per second that one rank of the first host gets through to one of the second; the best of some."""
    message, there = torch.zeros(_PROBE_BYTES, dtype=torch.uint8), config.ranks_per_host
    seconds = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(message, dst=there)
            dist.recv(message[:1], src=there)
        elif rank == there:
            dist.recv(message, src=0)
            dist.send(message[:1], dst=0)
        seconds.append(time.perf_counter() - start)
    best = torch.tensor(_PROBE_BYTES / min(seconds), dtype=torch.float64)
    dist.broadcast(best, src=0)
    return best.item()


def time_workload(rank: int, name: WorkloadName, config: Config, start_bar: StartBar) -> dict[str, Any]:
    """Race all contestants on one workload and summarise their turns."""
    torch.manual_seed(config.seed)
    task = workload(name, tiny=config.size == "smoke")
    field = field_of()
    models = contestants.enter(field, task.model())
    steps = {c.name: c.step(models[c.name], task, rank) for c in field}
    tune(steps, field, start_bar(f"{name}, tuning", STEPS_UNTIL_TUNED))
    order = schedule(contestants.heats(field), config.warmup_rounds + config.rounds, config.seed)
    advance = start_bar(name, len(order))
    turns = race(steps, order, config.steps_per_turn or task.steps_per_turn, dist.barrier, advance)
    wall, cpu = timed_rounds(turns, config.warmup_rounds)
    gradient_bytes = sum(p.nbytes for p in models[FLOOR].parameters())
    return {
        "title": task.title,
        "gradient_mib": gradient_bytes / 2**20,
        "floors_ms": floors(wall, gradient_bytes, config),
        "contestants": {c.name: figures(c, models, wall, cpu, config) for c in field if c.baseline is not None},
        "rounds_ms": {name: [round(seconds * 1e3, 4) for seconds in wall[name]] for name in wall},
    }


def tune(
    steps: Mapping[str, Callable[[], object]], field: Sequence[Contestant], advance: Callable[[], object]
) -> None:
    """So many steps of all who train that "auto" has made up its mind; all, so that they stay comparable."""
    for _ in range(STEPS_UNTIL_TUNED):
        for contestant in field:
            if contestant.baseline is not None:
                steps[contestant.name]()
        advance()


def field_of() -> list[Contestant]:
    """The floors, torch at its defaults, and minddp by each transport, with its default buckets and its own."""
    ours = [
        Contestant(
            f"minddp {transport.replace('_', ' ')}{', auto' * bool(options)}",
            "steps",
            BASELINE,
            wrapped_by(minddp_over(transport), options),
            transport=transport,
        )
        for transport in TRANSPORTS
        for options in ({}, {"bucket_cap_mb": "auto"})
    ]
    return [
        *(c for c in contestants.floors(TRANSPORTS) if c.name != contestants.ALONE),
        Contestant(BASELINE, "steps", BASELINE, wrapped_by(NativeDDP, {})),
        *ours,
    ]


# ------------------------------------------------------------------ arithmetic


def floors(wall: Times, gradient_bytes: int, config: Config) -> dict[str, Any]:
    """Milliseconds per step that cannot be beaten. See [Note: the floor of the wire]."""
    least_s = gradient_bytes / bytes_per_second(config.rate)
    return {
        "no_wrapper": median_ms(wall[FLOOR]),
        "all_reduce": {transport: median_ms(wall[wire(transport)]) for transport in TRANSPORTS},
        "wire": {
            "process_group": 1e3 * least_s * 2 * (config.world_size - 1) / config.world_size,
            "hierarchical": 1e3 * least_s * 2 * (HOSTS - 1) / HOSTS,
        },
    }


def figures(
    contestant: Contestant, models: Mapping[str, nn.Module], wall: Times, cpu: Times, config: Config
) -> dict[str, Any]:
    """All that is said of one contestant; each estimate is paired round by round."""
    name, compared = contestant.name, partial(compare, seed=config.seed)
    plan, tuning = (getattr(models[name], attribute, None) for attribute in ("plan", "tuning"))
    return {
        "median_ms": median_ms(wall[name]),
        "ratio": dataclasses.asdict(compared(wall[name], wall[BASELINE])),
        "cpu_ratio": dataclasses.asdict(compared(cpu[name], cpu[BASELINE])),
        "exposed_ms": dataclasses.asdict(estimate((wall[name] - wall[FLOOR]) * 1e3, config.seed)),
        "buckets": len(plan.buckets) if plan is not None else None,
        "tuning": str(tuning) if tuning is not None else None,
    } | agreement(models[name], models[BASELINE])


def agreement(model: nn.Module, torchs: nn.Module) -> dict[str, Any]:
    """Whether all ranks hold the same weights, and how far those are from torch's after as many steps."""
    pairs = list(zip(model.parameters(), torchs.parameters(), strict=True))
    ours = torch.cat([param.detach().flatten() for param, _ in pairs])
    theirs = torch.cat([param.detach().flatten() for _, param in pairs])
    of_rank_0 = ours.clone()
    dist.broadcast(of_rank_0, src=0)
    everywhere = torch.tensor(int(torch.equal(ours, of_rank_0)))
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    distance = torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs)
    return {"same_on_all_ranks": bool(everywhere), "distance_from_torch": distance.item()}


def across_workloads(timed: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """For each of minddp's contestants the median and the worst of the workloads' ratios."""
    names = [name for name in next(iter(timed.values()))["contestants"] if name != BASELINE]
    ratios = {name: [of["contestants"][name]["ratio"]["median"] for of in timed.values()] for name in names}
    return {name: {"median": float(np.median(values)), "worst": max(values)} for name, values in ratios.items()}


# ------------------------------------------------------------------ on the terminal


def print_report(report: Mapping[str, Any], console: Console) -> None:
    for result in report["workloads"].values():
        console.print(table(result))
    measured = report["wire"]["measured_bytes_per_s"]
    console.print(
        f"The cable: {report['config']['rate']}, {measured / 1e6:.0f} MB/s measured; load average "
        f"{report['machine']['load_average_before']} before, {report['machine']['load_average_after']} after."
    )
    console.print("Across workloads, time relative to torch's default (median, worst):")
    for name, across in report["across_workloads"].items():
        console.print(f"  {name:32} {across['median']:.3f}x  {across['worst']:.3f}x")
    if report["config"]["rate"] == AIM["rate"] and report["config"]["size"] == "full":
        console.print(aim_in_words(report["workloads"]))


def aim_in_words(timed: Mapping[str, Mapping[str, Any]]) -> str:
    """Where the aim is met, by the median and by the whole of its interval, and where it is missed."""
    ratios = {name: of["contestants"][AIM["contestant"]]["ratio"] for name, of in timed.items()}
    met = [name for name, ratio in ratios.items() if ratio["median"] <= AIM["ratio"]]
    surely = [name for name in met if ratios[name]["high"] <= AIM["ratio"]]
    missed = [name for name in ratios if name not in met]
    return (
        f"The aim for {AIM['contestant']}, at most {AIM['ratio']}: met in {', '.join(met) or 'none'} (with all of "
        f"the interval in {', '.join(surely) or 'none'}); missed in {', '.join(missed) or 'none'}."
    )


def table(result: Mapping[str, Any]) -> Any:
    floors = result["floors_ms"]
    rows = table_of(
        f"{result['title']}: {result['gradient_mib']:.2f} MiB",
        "contestant",
        *("buckets", "ms", "ratio", "95% interval", "spread", "cpu", "exposed ms", "from torch's weights"),
        caption=f"ms: no wrapper {floors['no_wrapper']:.1f}; "
        + "; ".join(
            f"by {transport.replace('_', ' ')}: cable at least {floors['wire'][transport]:.1f}, all-reduce alone "
            f"{floors['all_reduce'][transport]:.1f}"
            for transport in TRANSPORTS
        ),
    )
    for name, figured in result["contestants"].items():
        rows.add_row(
            name,
            str(figured["buckets"] or ""),
            f"{figured['median_ms']:.2f}",
            *(["", "", "", ""] if name == BASELINE else _beside_torch(figured)),
            f"{figured['exposed_ms']['median']:.1f}",
            _weights_in_words(figured),
        )
    return rows


def _beside_torch(figured: Mapping[str, Any]) -> list[str]:
    ratio = figured["ratio"]
    return [
        f"{ratio['median']:.3f}",
        interval(ratio),
        f"{ratio['spread']:.3f}",
        f"{figured['cpu_ratio']['median']:.3f}",
    ]


def _weights_in_words(figured: Mapping[str, Any]) -> str:
    if not figured["same_on_all_ranks"]:
        return "RANKS DIFFER"
    return "equal" if figured["distance_from_torch"] == 0 else f"{figured['distance_from_torch']:.0e}"


if __name__ == "__main__":
    main(tyro.cli(Config))
