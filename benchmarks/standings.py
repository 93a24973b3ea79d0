"""What is said of those who raced: arithmetic on the seconds of their rounds, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.contestants import ALONE, FLOOR, Contestant, wire
from benchmarks.harness import Times, compare, estimate, fastest, median_ms


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


@dataclass(frozen=True)
class Setup:
    """What figures depend on beside the times."""

    world_size: int
    examples: int  #: in each rank's batch
    seed: int  #: of the bootstrap


def figures(contestant: Contestant, wall: Times, cpu: Times, setup: Setup) -> dict[str, Any]:
    """All that is said of one contestant; each estimate is paired round by round."""
    name, baseline = contestant.name, contestant.baseline
    assert baseline is not None, "floors have no baseline"
    compared = partial(compare, seed=setup.seed)
    speedup = compared(setup.world_size * wall[ALONE], wall[name])
    return {
        "baseline": baseline,
        "median_ms": median_ms(wall[name]),
        "median_cpu_ms": median_ms(cpu[name]),
        "examples_per_s": setup.world_size * setup.examples / float(np.median(wall[name])),
        "ratio": dataclasses.asdict(compared(wall[name], wall[baseline])),
        "cpu_ratio": dataclasses.asdict(compared(cpu[name], cpu[baseline])),
        "exposed_ms": dataclasses.asdict(estimate((wall[name] - wall[FLOOR]) * 1e3, setup.seed)),
        "over_floor": dataclasses.asdict(compared(wall[name], floor_of(wall, contestant.transport))),
        "speedup": dataclasses.asdict(speedup),
        "efficiency": speedup.median / setup.world_size,
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
