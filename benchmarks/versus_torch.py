"""How long does a training step take beside torch's DistributedDataParallel, and beside lower bounds of any wrapper?

    python -m benchmarks.versus_torch                # the measurement, about ten minutes on two cores
    python -m benchmarks.versus_torch --size quick   # a look
    python -m benchmarks.versus_torch --control      # torch's class in both seats: what the harness itself adds

Each workload is trained by torch and by minddp at every setting, by other wrappers, and without one, all in one
process group. See [Note: paired rounds] for how the ratio is taken, and NOTES.md for how to read the table.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro

from benchmarks import contestants, machine
from benchmarks.contestants import (
    ALONE,
    AS_IT_COMES,
    BASELINE,
    FLOOR,
    Contestant,
    FieldOptions,
    Raced,
    TransportName,
    race_workload,
    wire,
)
from benchmarks.display import StartBar, Table, progress_of, ratio_cells
from benchmarks.harness import Rounds, Times, compare, estimate, fastest, median_ms
from benchmarks.question import RaceOptions, Report, ask, report_of
from benchmarks.workloads import WorkloadName, batch_of, workload

BARRIERS = 200


@dataclass(frozen=True, kw_only=True)
class Config(FieldOptions, RaceOptions):
    """Time a training step of minddp beside torch's DistributedDataParallel."""

    LEAST = RaceOptions.LEAST | {"rounds": 2}

    transports: tuple[TransportName, ...] | None = None
    """How minddp's bytes travel; by default all three ways, and on a GPU by the process group."""
    rounds: int = 26
    """Timed rounds, at least; a multiple of twice the number of heats is exactly fair."""
    seconds: float = 60.0
    """A workload of short steps has so many times these rounds that they take about this long, too."""
    control: bool = False
    """Put torch's class in minddp's seat: every ratio should be 1."""
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.workloads or not self.settings:
            raise ValueError("There is nothing to time; name at least one workload and one setting.")

    @property
    def race_rounds(self) -> Rounds:
        return dataclasses.replace(super().race_rounds, seconds=self.seconds if self.size == "full" else 0.0)

    def resolved(self) -> Config:
        """This configuration with all defaults spelled out; a quick look has fewer settings and no others."""
        has_one_way = self.device == "cuda" or self.control
        ways: tuple[TransportName, ...] = ("process_group", "shared_memory", "auto")
        config = dataclasses.replace(self, transports=self.transports or (ways[:1] if has_one_way else ways))
        if self.size != "quick":
            return config
        quick = tuple(setting for setting in self.settings if setting in ("default", "views_static"))
        return dataclasses.replace(config, settings=quick or self.settings[:1], others=())


def main(config: Config) -> None:
    name = "versus_torch_control" if config.control else "versus_torch"
    ask(name, time_workloads, contestants.without_absent(config.resolved()), tables, device=config.device)


def time_workloads(rank: int, config: Config) -> dict[str, Any]:
    """All workloads, one after another, on this rank; returns the report."""
    with progress_of(rank) as start_bar:
        timed = {name: time_workload(rank, name, config, start_bar) for name in config.workloads}
    return report_of(
        "time of a training step beside torch's DistributedDataParallel at equal settings",
        config,
        config.device,
        peak_memory_mib=round(machine.peak_memory_mib(), 1),
        barrier_us=barrier_us(config.seed),
        workloads=timed,
        across_workloads=across_workloads(timed),
    )


def time_workload(rank: int, name: WorkloadName, config: Config, start_bar: StartBar) -> dict[str, Any]:
    """Race all contestants on one workload and summarise their turns."""
    torch.manual_seed(config.seed)
    task = workload(name, tiny=config.is_smoke)
    assert config.transports is not None, "resolved"
    field = contestants.field(config.settings, config.transports, config.others, control=config.control)
    field = contestants.for_workload(field, task)
    model = task.model().to(config.device)
    steps = config.turn(task.steps_per_turn)
    raced = race_workload(rank, field, task, model, config.race_rounds, steps, start_bar)
    parameters = list(model.parameters())
    examples = len(batch_of(task, 0, torch.device("cpu"))[0])
    return {
        "title": task.title,
        "tensors": len(parameters),
        "parameters": sum(p.numel() for p in parameters),
        "gradient_mib": round(sum(p.nbytes for p in parameters) / 2**20, 2),
        "examples_per_step": examples,
        "rounds": len(raced.wall[FLOOR]),
        "floors": floors(raced.wall),
        "contestants": {
            c.name: figures(c, raced, config.world_size, examples) | {"same_bits": raced.same_bits(c)}
            for c in field
            if c.baseline
        },
        "best": best(field, raced.wall, config.seed),
        "rounds_ms": in_ms(raced.wall),
        "rounds_cpu_ms": in_ms(raced.cpu),
    }


def barrier_us(seed: int) -> Any:
    """The time of a barrier. Collective."""
    took = []
    for _ in range(BARRIERS):
        start = time.perf_counter()
        dist.barrier()
        took.append((time.perf_counter() - start) * 1e6)
    return estimate(np.array(took[BARRIERS // 10 :]), seed)


# ------------------------------------------------------------------ arithmetic on the rounds


def floors(wall: Times) -> dict[str, Any]:
    """Milliseconds per step that no wrapper can beat, and their parts."""
    return {
        "one_rank_alone_ms": median_ms(wall[ALONE]),
        "no_wrapper_ms": median_ms(wall[FLOOR]),
        "all_reduce_ms": {t: median_ms(wall[wire(t)]) for t in measured_wires(wall)},
        "floor_ms": {t: median_ms(floor_of(wall, t)) for t in measured_wires(wall)},
    }


def measured_wires(wall: Times) -> list[str]:
    return [t for t in ("process_group", "shared_memory") if wire(t) in wall]


def floor_of(wall: Times, transport: str) -> np.ndarray:
    """max(compute, bytes / bandwidth), round by round: everything hidden that can be hidden.

    "auto" may have chosen any transport, so its floor is the lower one.
    """
    wires = [wall[wire(t)] for t in measured_wires(wall) if transport in (t, "auto")]
    return np.maximum(wall[FLOOR], np.min(wires, axis=0)) if wires else wall[FLOOR]


def figures(contestant: Contestant, raced: Raced, world_size: int, examples: int) -> dict[str, Any]:
    """The figures of one contestant, `examples` in each rank's batch; estimates are paired round by round."""
    name, baseline, wall = contestant.name, contestant.baseline, raced.wall
    assert baseline is not None, "floors have no baseline"
    speedup = compare(world_size * wall[ALONE], wall[name], raced.seed)
    return {
        "baseline": baseline,
        "median_ms": raced.median_ms(name),
        "median_cpu_ms": median_ms(raced.cpu[name]),
        "examples_per_s": world_size * examples / float(np.median(wall[name])),
        "ratio": raced.ratio(name, baseline),
        "cpu_ratio": raced.cpu_ratio(name, baseline),
        "exposed_ms": raced.added_ms(name),
        "over_floor": compare(wall[name], floor_of(wall, contestant.transport), raced.seed),
        "speedup": speedup,
        "efficiency": speedup.median / world_size,
    }


def best(field: Sequence[Contestant], wall: Times, seed: int) -> dict[str, Any]:
    """minddp's fastest against torch's fastest, over the process group and over any transport.

    They are chosen in every other round and timed in the rest: else a contestant chosen by luck would be reported.
    """
    choosing = {name: seconds[::2] for name, seconds in wall.items()}
    theirs = fastest(choosing, [c.name for c in field if c.name == c.baseline])
    found = {}
    for transport in ("process_group", "any"):
        names = [c.name for c in field if c.name.startswith("minddp ") and transport in (c.transport, "any")]
        if names:
            ours = fastest(choosing, names)
            ratio = compare(wall[ours][1::2], wall[theirs][1::2], seed)
            found[transport] = {"torch": theirs, "minddp": ours, "ratio": ratio}
    return found


def across_workloads(timed: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The median and the worst of the workloads' ratios, for each contestant in minddp's seat."""
    medians: dict[str, list[float]] = {}
    for result in timed.values():
        for name, contestant in result["contestants"].items():
            if name.startswith("minddp "):
                medians.setdefault(name, []).append(contestant["ratio"].median)
    return {name: {"median": float(np.median(values)), "worst": max(values)} for name, values in medians.items()}


def in_ms(times: Times) -> dict[str, list[float]]:
    return {name: [round(seconds * 1e3, 4) for seconds in times[name]] for name in times}


# ------------------------------------------------------------------ tables


def tables(report: Report) -> Iterator[Table]:
    """Both with default options, the best of each, the workloads together; then a table for each workload."""
    workloads = report["workloads"].values()
    as_they_come = [
        [result["title"], f"{result['rounds']}", f"{theirs['median_ms']:.2f}", f"{ours['median_ms']:.2f}"]
        + ratio_cells(ours["ratio"])
        for result in workloads
        if (ours := result["contestants"].get(AS_IT_COMES)) and (theirs := result["contestants"].get(BASELINE))
    ]
    ours_and_theirs = ("torch ms", "minddp ms", "ratio", "95% interval")
    title = "As they come: `minddp.DistributedDataParallel(model)` against torch's"
    yield Table(title, ("workload", "rounds", *ours_and_theirs), as_they_come)
    # Where the fastest by any transport goes by the process group, it is one row.
    pairs = {(r["title"], pair["minddp"]): pair for r in workloads for pair in r["best"].values()}
    rows = [[of, pair["torch"], ours, *ratio_cells(pair["ratio"])] for (of, ours), pair in pairs.items()]
    headings = ("workload", "torch's best", "minddp's best", "ratio", "95% interval")
    yield Table("The fastest setting of each", headings, rows, f"A barrier takes {report['barrier_us']['median']:.0f} µs.")
    rows = [[name, f"{a['median']:.3f}", f"{a['worst']:.3f}"] for name, a in report["across_workloads"].items()]
    yield Table("Ratios across workloads", ("contestant", "median", "worst"), rows)
    yield from (table_of(result) for result in workloads)


def table_of(result: Report) -> Table:
    """All contestants of one workload; \\* is minddp with default options."""
    return Table(
        f"{result['title']}: {result['tensors']} tensors, {result['gradient_mib']} MiB; {result['rounds']} rounds",
        ("contestant", "ms", "ratio", "95% interval", "spread", "cpu", "exposed ms", "over floor", "speed-up", "examples/s"),
        [
            [
                f"{name} *" if name == AS_IT_COMES else name,
                f"{contestant['median_ms']:.2f}",
                *([""] * 4 if name == contestant["baseline"] else _cells_beside_torch(contestant)),
                f"{contestant['exposed_ms']['median']:.2f}",
                f"{contestant['over_floor']['median']:.2f}",
                f"{contestant['speedup']['median']:.2f}",
                f"{contestant['examples_per_s']:.0f}",
            ]
            for name, contestant in result["contestants"].items()
        ],
        f"{floors_in_words(result['floors'])}; {weights_in_words(result['contestants'])}.",
    )


def _cells_beside_torch(contestant: Report) -> list[str]:
    ratio = contestant["ratio"]
    return [*ratio_cells(ratio), f"{ratio['spread']:.3f}", f"{contestant['cpu_ratio']['median']:.3f}"]


def floors_in_words(floors: Report) -> str:
    wires = ", ".join(f"by {t.replace('_', ' ')} {ms:.2f}" for t, ms in floors["all_reduce_ms"].items())
    alone, bare = floors["one_rank_alone_ms"], floors["no_wrapper_ms"]
    return f"ms per step: {ALONE} {alone:.2f}, {FLOOR} {bare:.2f}, all-reduce only {wires}"


def weights_in_words(contestants: Report) -> str:
    differ = [name for name, contestant in contestants.items() if not contestant["same_bits"]]
    return f"weights DIFFER from torch's: {', '.join(differ)}" if differ else "all weights equal to the bit"


if __name__ == "__main__":
    main(tyro.cli(Config))
