"""How long does a training step take beside torch's DistributedDataParallel, and beside no wrapper?

    python -m benchmarks versus_torch                # the measurement, about ten minutes on two cores
    python -m benchmarks versus_torch --size quick   # a look
    python -m benchmarks versus_torch --control      # torch's class in both places: the harness's own error
    python -m benchmarks versus_torch --device cuda  # a rank for each GPU

Each workload is trained by torch and by minddp at every setting, by other wrappers, and without one, all in one
process group. See [Note: paired rounds] for how the ratio is taken, and NOTES.md for how to read the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch

from benchmarks import contestants, machine
from benchmarks.contestants import (
    AS_IT_COMES,
    BASELINE,
    FLOOR,
    NATIVE_OVER_MINDDP,
    Contestant,
    OtherName,
    SettingName,
    TransportName,
    Transports,
)
from benchmarks.display import RATIO, Table, table_of
from benchmarks.launch import DeviceName
from benchmarks.own_model import own_workload
from benchmarks.question import RaceOptions, Report, ask, report_of
from benchmarks.race import race_workload
from benchmarks.workloads import Size, Workload, WorkloadName, workload


@dataclass(frozen=True, kw_only=True)
class Config(RaceOptions):
    """Time a training step of minddp beside torch's DistributedDataParallel."""

    LEAST = RaceOptions.LEAST | {"rounds": 2}

    workloads: tuple[WorkloadName, ...] = tuple(name for name in get_args(WorkloadName) if name != "short")
    settings: tuple[SettingName, ...] = ("default", "views", "static", "batched", "views_static")
    """Constructor options, given to both implementations alike."""
    model: str | None = None
    """A model of your own in place of the workloads: file.py:make or package.module:make. make() returns a module
    and a function loss(model), which returns a scalar."""
    others: tuple[OtherName, ...] = get_args(OtherName)
    """Other ways to train: torch's `fully_shard` (FSDP2) and `ZeroRedundancyOptimizer`, and torch's classes over
    the backend "minddp"."""
    device: DeviceName = "cpu"
    """With "cuda", a GPU for each rank, NCCL, and larger models."""
    transports: Transports = ("process_group", "shared_memory", "auto")
    """minddp's transport; for torch in its place always the process group, on a GPU also "nccl"."""
    rounds: int = 26
    """An even number is fair to both of a pair."""
    control: bool = False
    """Put torch's class in minddp's place: every ratio should be 1."""
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.workloads or not self.settings:
            raise ValueError("There is nothing to time; name at least one workload and one setting.")
        if self.others and "default" not in self.settings:
            raise ValueError(
                "--others are compared with torch at its default settings: add default to --settings, or give "
                "--others without a name."
            )

    @property
    def workload_size(self) -> Size:
        return "gpu" if self.device == "cuda" and self.size != "smoke" else super().workload_size

    def resolved(self) -> Config:
        """This configuration without anything that cannot run."""
        transports = ("process_group",) if self.control else self.transports
        config = dataclasses.replace(self, transports=transports, settings=contestants.supported(self.settings))
        if self.device == "cuda":
            has_cupy = not machine.cupy_version().startswith("none")
            on_gpu: tuple[TransportName, ...] = ("process_group", "nccl") if has_cupy else ("process_group",)
            config = dataclasses.replace(config, transports=on_gpu, world_size=torch.cuda.device_count())
        return config


def main(config: Config) -> None:
    name = "versus_torch_control" if config.control else "versus_torch"
    ask(name, time_workloads, config.resolved(), tables, device=config.device)


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """All workloads, one after another, on this rank; returns the report."""
    own = [own_workload(config.model)] if config.model is not None else []
    tasks = own or [workload(name, config.workload_size) for name in config.workloads]
    timed = {task.name: time_workload(rank, task, config) for task in tasks}
    question = "time of a training step beside torch's DistributedDataParallel at equal settings"
    return report_of(question, config, config.device, workloads=timed)


def time_workload(rank: int, task: Workload, config: Config) -> dict[str, Any]:
    """Race all contestants on one workload and summarise their turns."""
    pairs = contestants.pairs(config.settings, config.transports, control=config.control)
    field = [Contestant(FLOOR, "floors"), *pairs, *map(contestants.other, config.others)]
    field = contestants.able(field, task, config.device)
    raced = race_workload(rank, task, field, config, device=config.device)
    both = (AS_IT_COMES, NATIVE_OVER_MINDDP)
    over = {"both_over_minddp": raced.ratio(*both)} if {*both} <= raced.models.keys() else {}
    return (
        raced.described()
        | over
        | {
            "no_wrapper_ms": raced.median_ms(FLOOR),
            "contestants": {c.name: raced.figures(c) for c in field if c.baseline},
        }
    )


# ------------------------------------------------------------------ tables


COLUMNS = {
    "ms": "{median_ms:.2f}",
    "ratio": RATIO,
    "exposed ms": "{exposed_ms[median]:.2f}",
    "of torch's": "{exposed_ratio[median]:.2f}",
}
RATIO_OF_NATIVE = RATIO.replace("ratio", "native[ratio]")


def tables(report: Report) -> Iterator[Table]:
    """Both with default options, then a table for each workload."""
    workloads = report["workloads"].values()
    both = {
        result["title"]: ours | {"torch_ms": theirs["median_ms"]}
        for result in workloads
        if (ours := result["contestants"].get(AS_IT_COMES)) and (theirs := result["contestants"].get(BASELINE))
    }
    title = "As they come: `minddp.DistributedDataParallel(model)` against torch's"
    columns = {"torch ms": "{torch_ms:.2f}", "minddp ms": "{median_ms:.2f}", "ratio": RATIO}
    yield table_of(title, "workload", columns, both)
    over = {
        result["title"]: {"ratio": result["both_over_minddp"], "native": result["contestants"][NATIVE_OVER_MINDDP]}
        for result in workloads
        if "both_over_minddp" in result
    }
    if over:
        columns = {"torch's, of torch's over gloo": RATIO_OF_NATIVE, "minddp's, of torch's over it": RATIO}
        yield table_of("Both wrappers over the backend minddp", "workload", columns, over)
    for result in workloads:
        size = f"{result['tensors']} tensors, {result['gradient_mib']} MiB; {result['rounds']} rounds"
        differ = [name for name, of in result["contestants"].items() if not of["same_bits"]]
        weights = f"weights DIFFER from torch's: {', '.join(differ)}" if differ else "all weights equal to the bit"
        caption = f"ms per step: {FLOOR} {result['no_wrapper_ms']:.2f}; {weights}."
        yield table_of(f"{result['title']}: {size}", "contestant", COLUMNS, result["contestants"], caption)
