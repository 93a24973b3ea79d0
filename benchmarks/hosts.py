"""How long does a step take on two hosts with a slow network between them, beside torch's DDP on the same two?

    sudo python -m benchmarks hosts                  # 1 Gbit/s, two ranks on each; about ten minutes on two cores
    sudo python -m benchmarks hosts --rate 10gbit
    sudo python -m benchmarks hosts --size smoke     # to see that all runs

The hosts are network namespaces (see `namespaces.py`), made at the beginning and removed at the end. All ranks
share this machine's cores, which two hosts would not, so computing takes longer here than on two hosts. The
network's share is bounded separately: [Note: the floor of the wire].

[Note: the floor of the wire]
For N bytes of gradients, in whatever order they are added, N bytes must leave each of two hosts; over a flat ring
2 (W-1)/W N bytes do, W being the number of ranks. Divided by the rate of the cable, that is a time that a step
cannot beat. Neither can it beat its own computing. The time beyond that is exposed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel as NativeDDP

from benchmarks.contestants import BASELINE, FLOOR, Contestant, minddp_over, settled_step, wrapped_by
from benchmarks.display import RATIO, Table, table_of
from benchmarks.harness import Times, median_ms
from benchmarks.namespaces import HOSTS, bytes_per_second, settle, two_hosts
from benchmarks.question import RaceOptions, Report, ask, report_of
from benchmarks.race import race_workload
from benchmarks.workloads import WorkloadName, workload

TRANSPORTS = ("process_group", "hierarchical")


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time a training step on two hosts that are connected by a cable of a certain rate."""

    LEAST = RaceOptions.LEAST | {"world_size": HOSTS}

    rate: str = "1gbit"
    """Rate of the cable in each direction: a number of kbit, mbit or gbit."""
    workloads: tuple[WorkloadName, ...] = ("many_small", "transformer", "wide_mlp", "convnet")
    world_size: int = 4
    """Half of the ranks are on each host."""
    rounds: int = 12
    warmup_rounds: int = 1
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        bytes_per_second(self.rate)
        if self.world_size % HOSTS:
            raise ValueError(f"world_size is {self.world_size}; give a multiple of {HOSTS}, as many for each host.")


def main(config: Config) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or it warns of addresses that have no names
    with two_hosts(config.rate) as hosts:
        ranks_per_host = config.world_size // HOSTS
        ask(f"hosts_{config.rate}", time_workloads, config, tables, settle=partial(settle, hosts, ranks_per_host))


# ------------------------------------------------------------------ on each rank


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    timed = {name: time_workload(rank, name, config) for name in config.workloads}
    return report_of(
        "time of a training step on two hosts beside torch's DistributedDataParallel there",
        config,
        workloads=timed,
    )


def time_workload(rank: int, name: WorkloadName, config: Config) -> dict[str, Any]:
    """Race all contestants on one workload and summarise their turns."""
    field = field_of()
    raced = race_workload(rank, workload(name, config.workload_size), field, config)
    gradient_bytes = sum(p.nbytes for p in raced.models[FLOOR].parameters())
    return raced.described() | {
        "floors_ms": floors(raced.wall, gradient_bytes, config),
        "contestants": {c.name: raced.figures(c) for c in field if c.baseline},
    }


def field_of() -> list[Contestant]:
    """The floors, torch at its defaults, and minddp by each transport, with its default buckets and its own."""
    ours = [
        Contestant(
            f"minddp {transport.replace('_', ' ')}{', auto' * bool(options)}",
            "steps",
            BASELINE,
            wrapped_by(minddp_over(transport), options),
            settled_step,
        )
        for transport in TRANSPORTS
        for options in ({}, {"bucket_cap_mb": "auto"})
    ]
    return [
        Contestant(FLOOR, "floors"),
        Contestant(BASELINE, "steps", BASELINE, wrapped_by(NativeDDP, {}), settled_step),
        *ours,
    ]


# ------------------------------------------------------------------ arithmetic


def floors(wall: Times, gradient_bytes: int, config: Config) -> dict[str, Any]:
    """Lower bounds in milliseconds per step. See [Note: the floor of the wire]."""
    least_s = gradient_bytes / bytes_per_second(config.rate)
    return {
        "no_wrapper": median_ms(wall[FLOOR]),
        "wire": {
            "process_group": 1e3 * least_s * 2 * (config.world_size - 1) / config.world_size,
            "hierarchical": 1e3 * least_s * 2 * (HOSTS - 1) / HOSTS,
        },
    }


# ------------------------------------------------------------------ tables


COLUMNS = {
    "ms": "{median_ms:.2f}",
    "ratio": RATIO,
    "exposed ms": "{exposed_ms[median]:.1f}",
}


def tables(report: Report) -> Iterator[Table]:
    for result in report["workloads"].values():
        floors = result["floors_ms"]
        bounds = (f"by {t.replace('_', ' ')}: cable at least {floors['wire'][t]:.1f}" for t in TRANSPORTS)
        caption = f"ms: {FLOOR} {floors['no_wrapper']:.1f}; {'; '.join(bounds)}"
        title = f"{result['title']}: {result['gradient_mib']:.2f} MiB"
        yield table_of(title, "contestant", COLUMNS, result["contestants"], caption)
