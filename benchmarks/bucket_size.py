"""How does a step depend on the size of the buckets, and does `bucket_cap_mb="auto"` find and predict a good one?

    python -m benchmarks.bucket_size     # about four minutes on two cores

Small buckets leave early but pay a latency each; large ones leave late, and nothing hides the last one. Each
capacity is a heat of torch's class and minddp's, by the process group and by shared memory. Beside minddp's steps
stands what "auto" would have predicted for them: see `forecast.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

from benchmarks import contestants
from benchmarks.contestants import FLOOR, Contestant, minddp_over, wrapped_by
from benchmarks.display import StartBar, interval, progress_of, table_of
from benchmarks.forecast import AIM, by_chosen_plan, forecast, forecast_cells
from benchmarks.harness import Times, compare, estimate, median_ms, timed_race
from benchmarks.question import RaceOptions, ask, report_of
from benchmarks.workloads import WorkloadName, training_step, workload
from minddp import DistributedDataParallel

FAMILIES = {
    "torch": NativeDDP,
    "minddp": minddp_over("process_group"),
    "minddp, shared memory": minddp_over("shared_memory"),
}
STEPS_UNTIL_TUNED = 32  # minddp.forecast watches 11 steps before it changes the buckets and 11 after


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time a step at several sizes of buckets."""

    workloads: tuple[WorkloadName, ...] = ("transformer", "wide_mlp")
    caps_mib: tuple[float, ...] = (0.25, 1, 5, 25, 100)
    """Capacities of the buckets in MiB, the first one included; the default and "auto" come on top."""
    steps_per_turn: int | None = None
    """By default the workload's own."""
    tiny: bool = False
    """Models of no size, to see that all runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.caps_mib or min(self.caps_mib) <= 0:
            raise ValueError(f"caps_mib is {self.caps_mib}; give at least one capacity, all above 0.")


def main(config: Config) -> None:
    ask("bucket_size", time_workloads, config, print_report)


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """One race for each workload, on this rank; returns the report, ready for JSON."""
    with progress_of(rank) as start_bar:
        timed = {name: time_workload(rank, name, config, start_bar) for name in config.workloads}
    return report_of("time of a step by the capacity of the buckets", config, aim=AIM, workloads=timed)


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
    wall, _ = timed_race(
        steps,
        contestants.heats(field),
        config.race_rounds,
        config.steps_per_turn or task.steps_per_turn,
        partial(start_bar, name),
    )
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
        "tuning": str(models[name].tuning) if heat == "auto" else None,
        "forecast": forecast_of(models, wall, family, heat, config.seed),
    }


def forecast_of(
    models: Mapping[str, nn.Module], wall: Times, family: str, heat: str, seed: int
) -> dict[str, Any] | None:
    """By what "auto" of the same family has observed; `None` for torch, and for the default plan, which it was."""
    if family == "torch" or heat == "default":
        return None
    ddp, tuned = models[seat(family, heat)], models[seat(family, "auto")]
    assert isinstance(ddp, DistributedDataParallel), "torch's class has no plan to look at"
    assert isinstance(tuned, DistributedDataParallel), "likewise"
    assert tuned.tuning is not None, "so many steps have been taken that it has made up its mind"
    by_default, by_plan, plan = wall[seat(family, "default")], wall[seat(family, heat)], ddp.plan
    if heat == "auto":
        plan, by_plan = tuned.tuning.plan, by_chosen_plan(tuned.tuning, by_default, by_plan)
    return forecast(tuned.tuning, plan, by_default, by_plan, seed)


def print_report(report: Mapping[str, Any], console: Console) -> None:
    for result in report["workloads"].values():
        console.print(table(result))
        console.print(forecast_table(result))
        for family, by_heat in result["families"].items():
            if "auto" in by_heat:
                console.print(f"  {family}: {by_heat['auto']['tuning']}")
    console.print(forecasts_in_words(report))


def table(result: Mapping[str, Any]) -> Table:
    rows = table_of(
        f"{result['title']}: {result['gradient_mib']:.2f} MiB",
        "family",
        *("bucket MiB", "buckets", "ms", "95% interval", "over no wrapper", "ratio to torch", "95% interval"),
        caption=f"no wrapper: {result['no_wrapper_ms']:.2f} ms",
    )
    for family, by_heat in result["families"].items():
        for heat, figured in by_heat.items():
            ratio = figured["ratio"]
            rows.add_row(
                family,
                heat,
                str(figured["buckets"] or ""),
                f"{figured['median_ms']['median']:.2f}",
                interval(figured["median_ms"], digits=2),
                f"{figured['over_no_wrapper']['median']:.3f}",
                *([] if family == "torch" else [f"{ratio['median']:.3f}", interval(ratio)]),
            )
        rows.add_section()
    return rows


def forecast_table(result: Mapping[str, Any]) -> Table:
    rows = table_of(
        f"{result['title']}: a step as predicted and as measured",
        "family",
        *("bucket MiB", "predicted ms", "measured ms", "error", "95% interval"),
    )
    for family, by_heat in result["families"].items():
        for heat, figured in by_heat.items():
            if figured["forecast"] is not None:
                rows.add_row(family, heat, *forecast_cells(figured["forecast"]))
        rows.add_section()
    return rows


def forecasts_in_words(report: Mapping[str, Any]) -> str:
    """How many predictions are as good as they should be."""
    by_heat = [
        (heat, figured["forecast"]["within_aim"])
        for result in report["workloads"].values()
        for figures_of in result["families"].values()
        for heat, figured in figures_of.items()
        if figured["forecast"] is not None
    ]
    chosen = [is_within for heat, is_within in by_heat if heat == "auto"]
    fixed = [is_within for heat, is_within in by_heat if heat != "auto"]
    return (
        f"Predicted within {report['aim']:.0%} of what was measured: {sum(chosen)} of {len(chosen)} plans that "
        f"were chosen, {sum(fixed)} of {len(fixed)} that were not."
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
