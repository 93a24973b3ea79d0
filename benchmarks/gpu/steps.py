"""A workload on each rank: every contestant by itself, then all in a race, as far as time goes.

[Note: what fails is left out]
A card's time is short, and one contestant that cannot run there (a transport without its library, say) must not
take the others' figures with it. Whoever fails by itself, on any rank, is named with its error and does not race.
And no round begins once the time for the race is over: fewer rounds say less, but say it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import contestants
from benchmarks.accounting import peak_memory
from benchmarks.contestants import FLOOR, Contestant
from benchmarks.gpu import aims
from benchmarks.gpu.card import has_cupy
from benchmarks.gpu.device import stopwatch, work_of
from benchmarks.gpu.models import gpu_workload
from benchmarks.harness import Times, compare, median_ms, schedule
from benchmarks.workloads import Workload

MIB = 2**20
SETTINGS = ("default", "views", "static", "batched", "views_static")
FIRST_STEPS = 4  # buckets are rebuilt within
FEWEST_ROUNDS = 2  # one to choose the fastest in, one to time them in


def measure(rank: int, name: str, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """All figures of the workload `name`, ready for JSON."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    task = gpu_workload(name, tiny=options.rehearse)
    model = task.model().to(device)
    alone = {c.name: look_at(c, copy.deepcopy(model), task, rank) for c in contestants_for(device)}
    failed = {contestant: found["error"] for contestant, found in alone.items() if "error" in found}
    field = [c for c in contestants_for(device) if c.name not in failed and c.baseline not in failed]
    models = contestants.enter(field, model)
    steps = {c.name: c.step(models[c.name], task, rank) for c in field}
    order = schedule(contestants.heats(field), options.warmup_rounds + options.rounds, options.seed)
    fewest = options.warmup_rounds + FEWEST_ROUNDS
    turns = race(steps, models, order, task.steps_per_turn, device, options.race_s, fewest)
    times = slowest(turns, options.warmup_rounds)
    parameters = list(model.parameters())
    return {
        "title": task.title,
        "ranks": dist.get_world_size(),
        "tensors": len(parameters),
        "gradient_mib": round(sum(p.nbytes for p in parameters) / MIB, 2),
        "contestants": {c.name: figures(c, times, alone, options.seed) for c in field},
        "failed": failed,
        "targets": aims.met_by(name, field, times, alone, dist.get_world_size(), options.seed),
        "rounds_ms": {c: [round(1e3 * s, 4) for s in times[c]] for c in times},
    }


def contestants_for(device: str) -> list[Contestant]:
    """No wrapper, and at each setting torch, then minddp by the process group and, on a GPU, straight on NCCL."""
    settings = [s for s in SETTINGS if s not in contestants.unknown_to_torch(SETTINGS)]
    transports = ["process_group"]
    if device == "cuda" and has_cupy():
        transports.append("nccl")
    return [Contestant(FLOOR, "floors"), *contestants.pairs(settings, transports)]


def look_at(contestant: Contestant, model: nn.Module, task: Workload, rank: int) -> dict[str, Any]:
    """Its peak of memory beyond the parameters, and the work of one of its steps; or the `error` of some rank."""
    gc.collect()
    error: str | None = None
    found: dict[str, Any] = {}
    try:
        with peak_memory(next(model.parameters()).device) as peak:
            step = contestant.step(contestant.wrap(model), task, rank)
            for _ in range(FIRST_STEPS):
                step()
        found = {"peak_mib": round(peak.nbytes / MIB, 2)} | work_of(step)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    found |= next(({"error": f"rank {r}: {said}"[:1000]} for r, said in enumerate(errors) if said is not None), {})
    if rank == 0:
        print(f"{task.name}, {contestant.name}: {found}", flush=True)  # all that is left if a later one hangs
    return found


def race(
    steps: Mapping[str, Callable[[], object]],
    models: Mapping[str, nn.Module],
    order: Sequence[Sequence[str]],
    steps_per_turn: int,
    device: str,
    limit_s: float,
    fewest: int,
) -> dict[str, list[float]]:
    """Seconds per step of each contestant, round by round, on this rank. See [Note: paired rounds].

    After the `fewest` rounds, none begins once `limit_s` seconds are over. See [Note: what fails is left out].
    """
    turns: dict[str, list[float]] = {name: [] for name in steps}
    began = time.monotonic()
    with garbage_left_to_us():
        for number, names in enumerate(order):
            if number >= fewest and any_rank(time.monotonic() - began > limit_s, device):
                break
            for name in names:
                gc.collect()
                steps[name]()
                dist.barrier()
                with stopwatch(device) as took:
                    for _ in range(steps_per_turn):
                        steps[name]()
                turns[name].append(took[0] / steps_per_turn)
                models[name].zero_grad(set_to_none=True)
    return turns


@contextmanager
def garbage_left_to_us() -> Iterator[None]:
    """Nothing is collected by itself, and what is alive now is not looked at: thirty thousand parameters."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def any_rank(says_so: bool, device: str) -> bool:
    """Whether some rank does: the same answer on all. Collective."""
    voices = torch.tensor([float(says_so)], device=device)
    dist.all_reduce(voices)
    return bool(voices.item())


def slowest(turns: Mapping[str, Sequence[float]], warmup_rounds: int) -> dict[str, np.ndarray]:
    """In each round that counts, the time of the slowest rank. Collective."""
    of_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, {name: list(seconds[warmup_rounds:]) for name, seconds in turns.items()})
    return {name: np.max([seconds[name] for seconds in of_rank], axis=0) for name in turns}


def figures(contestant: Contestant, times: Times, alone: Mapping[str, Any], seed: int) -> dict[str, Any]:
    name = contestant.name
    own: dict[str, Any] = {"median_ms": median_ms(times[name]), **alone[name]}
    if FLOOR in times:
        own["over_bare"] = dataclasses.asdict(compare(times[name], times[FLOOR], seed))
    if contestant.baseline is not None:
        own["baseline"] = contestant.baseline
        own["ratio"] = dataclasses.asdict(compare(times[name], times[contestant.baseline], seed))
    return own
