"""`python -m docs.site.recording`: one step of two ranks, function by function, kept in recorded_step.json.

Python's profiler reports each call of a function of core/, transport/ and reference/ while two ranks make one step
of the model of docs/learning, after twelve others. What is kept does not depend on the clock: how often a function
was called on each rank, the place of its first call among all first calls, and in which part of the step that was.
"""

from __future__ import annotations

import json
import sys
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import minddp
from docs.learning.small_net import CAP_MIB, examples_of, loss_of, small_net
from reference.ladder import RUNGS

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).parent / "recorded_step.json"
RECORDED = ("minddp/core/", "minddp/transport/", "reference/")
TRANSPORTS = ("shared_memory", "process_group")  # the first is what "auto" opens on one host
RUNS = (*TRANSPORTS, *RUNGS)
WARMUP_STEPS = 12  # the logger looks closer at the first ten


class Called(NamedTuple):
    """`calls[rank]`: how often. `order` counts first calls from 1, on rank 0 or else on the next that made one."""

    function: str
    calls: list[int]
    order: int
    during: str


def record(run: str) -> list[Called]:
    """Start two ranks, and record a step on both."""
    of_rank = minddp.launch(calls_of_a_step, run, timeout_s=120.0)
    firsts = {name: first for seen in reversed(of_rank) for name, (_, *first) in seen.items()}
    called = [Called(name, [seen.get(name, (0,))[0] for seen in of_rank], *firsts[name]) for name in firsts]
    return sorted(called, key=lambda one: one.order)


def calls_of_a_step(rank: int, run: str) -> dict[str, list[Any]]:
    """For each function: how often it was called, its order, and the part of the step."""
    seen: dict[str, list[Any]] = {}
    training = training_of(run, rank)
    for does in WARMUP_STEPS * [*training.values()]:
        does()
    for part, does in training.items():
        sys.setprofile(partial(count, seen, part))
        does()
        sys.setprofile(None)
    return seen


def count(seen: dict[str, list[Any]], during: str, frame: FrameType, event: str, _: object) -> None:
    """Called by Python for each call and return; comprehensions and lambdas have no name."""
    path = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
    if event == "call" and path.startswith(RECORDED):
        name = frame.f_code.co_qualname.replace(".<locals>", "")
        if "<" not in name:
            seen.setdefault(f"{path}::{name}", [0, len(seen) + 1, during])[0] += 1


def training_of(run: str, rank: int) -> dict[str, Any]:
    """The parts of a step, by name; none on a rank that a rung leaves out."""
    losses: list[torch.Tensor] = []
    sgd = partial(torch.optim.SGD, lr=0.1)
    if run in TRANSPORTS:
        module: Any = minddp.DistributedDataParallel(small_net(), bucket_cap_mb=CAP_MIB, transport=run)
        module.step = sgd(module.parameters()).step
    elif run != "data_parallel":
        module = RUNGS[run](small_net(), sgd)
    elif rank == 0:
        module = RUNGS[run](small_net(), sgd, devices=["cpu", "cpu"])
    else:
        return {}
    return {
        "forward": lambda: losses.append(loss_of(module, examples_of(rank))),
        "backward": lambda: losses.pop().backward(),
        "end of the step": module.step,
    }


@cache
def kept() -> dict[str, list[Called]]:
    """All recorded steps, by run."""
    return {run: [Called(*row) for row in rows] for run, rows in json.loads(KEPT.read_text()).items()}


def run_for(file: str) -> str | None:
    """The run that is shown beside a file: of those that call its functions, that of its own rung, or the first."""
    calling = [run for run, rows in kept().items() if any(row.function.startswith(f"{file}::") for row in rows)]
    return Path(file).stem if Path(file).stem in calling else next(iter(calling), None)


def main() -> None:
    rows = {run: ",\n".join(map(json.dumps, record(run))) for run in RUNS}
    KEPT.write_text("{\n" + ",\n".join(f'"{run}": [\n{lines}\n]' for run, lines in rows.items()) + "\n}\n")


if __name__ == "__main__":
    main()
