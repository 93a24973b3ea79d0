"""How does a step depend on the size of the buckets, and does `bucket_cap_mb="auto"` find a good one?

    python -m benchmarks bucket_size     # about four minutes on two cores

Small buckets leave early but pay a latency each; large ones leave late, and nothing hides the last one. Each
capacity is a heat of torch's class and minddp's, by the process group and by shared memory. Below the steps stands
what "auto" has chosen, with the time that it predicts and the time that it measures (`ddp.tuning`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel as NativeDDP

from benchmarks.contestants import FLOOR, Contestant, minddp_over, settled_step, wrapped_by
from benchmarks.display import RATIO, Table, table_of
from benchmarks.harness import estimate
from benchmarks.question import RaceOptions, Report, ask, report_of
from benchmarks.race import Raced, race_workload
from benchmarks.workloads import WorkloadName, training_step, workload

FAMILIES = {
    "torch": NativeDDP,
    "minddp": minddp_over("process_group"),
    "minddp, shared memory": minddp_over("shared_memory"),
}


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time a step at several sizes of buckets."""

    workloads: tuple[WorkloadName, ...] = ("transformer", "wide_mlp")
    caps_mib: tuple[float, ...] = (0.25, 1, 5, 25, 100)
    """Capacities of the buckets in MiB, the first one included; the default and "auto" come on top."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.caps_mib or min(self.caps_mib) <= 0:
            raise ValueError(f"caps_mib is {self.caps_mib}; give at least one capacity, all above 0.")


def main(config: Config) -> None:
    ask("bucket_size", time_workloads, config, tables)


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    timed = {name: time_workload(rank, name, config) for name in config.workloads}
    return report_of("time of a step by the capacity of the buckets", config, workloads=timed)


def time_workload(rank: int, name: WorkloadName, config: Config) -> dict[str, Any]:
    task = workload(name, config.workload_size)
    raced = race_workload(rank, task, field_of(config.caps_mib), config)
    return raced.described() | {
        "no_wrapper_ms": raced.median_ms(FLOOR),
        "families": {
            family: {heat: figures(raced, family, heat) for heat in heats_of(family, config.caps_mib)}
            for family in FAMILIES
        },
    }


def heats_of(family: str, caps_mib: tuple[float, ...]) -> dict[str, dict[str, Any]]:
    """The capacities of a family and their options: by default 1 and 25 MiB, fixed ones, or "auto"."""
    fixed: dict[str, dict[str, Any]] = {"default": {}} | {f"{cap:g}": {"bucket_cap_mb": cap} for cap in caps_mib}
    return fixed if family == "torch" else fixed | {"auto": {"bucket_cap_mb": "auto"}}


def seat(family: str, heat: str) -> str:
    return f"{family} at {heat}"


def torch_beside(heat: str) -> str:
    """The baseline: torch at the same capacity, and for "auto" torch's default."""
    return seat("torch", "default" if heat == "auto" else heat)


def field_of(caps_mib: tuple[float, ...]) -> list[Contestant]:
    """No wrapper, then all families at each capacity."""
    return [
        Contestant(FLOOR, "floors"),
        *(
            Contestant(
                seat(family, heat),
                heat,
                torch_beside(heat),
                wrapped_by(FAMILIES[family], options),
                settled_step if heat == "auto" else training_step,
            )
            for heat, options in heats_of("minddp", caps_mib).items()
            for family in FAMILIES
            if heat in heats_of(family, caps_mib)
        ),
    ]


def figures(raced: Raced, family: str, heat: str) -> dict[str, Any]:
    """The figures of one family at one capacity."""
    name = seat(family, heat)
    plan = getattr(raced.models[name], "plan", None)
    return {
        "median_ms": estimate(raced.wall[name] * 1e3, raced.seed),
        "ratio": raced.ratio(name, torch_beside(heat)),
        "buckets": len(plan.buckets) if plan is not None else None,
        "tuning": str(raced.models[name].tuning) if heat == "auto" else None,
    }


COLUMNS = {
    "buckets": "{buckets}",
    "ms": "{median_ms[median]:.2f} ({median_ms[low]:.2f}–{median_ms[high]:.2f})",
    "ratio to torch": RATIO,
}


def tables(report: Report) -> Iterator[Table]:
    for result in report["workloads"].values():
        figured = {seat(family, heat): of for family, by in result["families"].items() for heat, of in by.items()}
        tunings = [f"{name}: {of['tuning']}" for name, of in figured.items() if of["tuning"] is not None]
        caption = "\n".join([f"{FLOOR}: {result['no_wrapper_ms']:.2f} ms", *tunings])
        title = f"{result['title']}: {result['gradient_mib']:.2f} MiB"
        yield table_of(title, "family at MiB", COLUMNS, figured, caption)
