"""The shared harness: contestants race in paired, alternating rounds, and a ratio is taken per round.

[Note: paired rounds]
Speed on a shared machine drifts by more than the differences measured here. So all contestants share one process
group and one run, and a *heat* (the contestants to be compared) is run back to back in every round: drift hits both
sides of a pair alike and cancels in their ratio. Position does not cancel, because a contestant starts with the
caches that the one before left. So the heats are shuffled in each round, and the order inside a heat alternates.
The figure is the median over rounds of the ratio, which one disturbed round cannot move; the bootstrap interval
shows its uncertainty. Turns are short and rounds many, because a disturbance lasts longer than a step: more pairs
beat longer ones.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist


def schedule(heats: Sequence[Sequence[str]], rounds: int, seed: int) -> list[list[str]]:
    """The order of all contestants in each round. It depends on the seed alone, so all ranks have the same.

    The heats follow each other at random. Within a heat the first contestant changes in turn.
    """
    rng = random.Random(seed)
    order = []
    for number in range(rounds):
        shuffled = rng.sample(heats, len(heats))
        turned = (heat[number % len(heat) :] + heat[: number % len(heat)] for heat in map(list, shuffled))
        order.append([name for heat in turned for name in heat])
    return order


def race(
    contestants: Mapping[str, Callable[[], object]],
    order: Sequence[Sequence[str]],
    steps_per_turn: int,
    barrier: Callable[[], object],
    on_round: Callable[[], object] = lambda: None,
    settle: Callable[[], object] = lambda: None,
    leave: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Run every round of `order` on this rank; returns the seconds per step of each's turns, round by round.

    A turn is a barrier, one untimed step that brings the contestant's data back into the caches, then
    `steps_per_turn` timed steps. The garbage collector runs between turns and never inside one. `settle` waits for
    work that a step has only begun: on a GPU, its kernels. `leave(name)` follows a turn and frees its memory.
    """
    turns: dict[str, list[float]] = {name: [] for name in contestants}
    with _no_garbage_collection():
        for names in order:
            for name in names:
                gc.collect()
                barrier()
                turns[name].append(_timed_turn(contestants[name], steps_per_turn, settle))
                leave(name)
            on_round()
    return turns


def _timed_turn(step: Callable[[], object], steps: int, settle: Callable[[], object]) -> float:
    step()
    settle()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    settle()
    return (time.perf_counter() - start) / steps


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect in explicit calls only. Objects alive now are frozen, which makes `gc.collect` quick to repeat."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


RESAMPLES = 5000  # of the bootstrap
Times = Mapping[str, np.ndarray]  #: for each contestant, seconds per step in each round: `[rounds]` float64


def over_ranks(turns_of_rank: Sequence[Mapping[str, Sequence[float]]]) -> Times:
    """One time for each round: the slowest rank's."""
    return {name: np.max([turns[name] for turns in turns_of_rank], axis=0) for name in turns_of_rank[0]}


def gathered(value: Any) -> list[Any]:
    """`value` of every rank. Collective."""
    of_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, value)
    return of_rank


@dataclass(frozen=True)
class Rounds:
    """How many rounds a race has: `warmup`, which are thrown away, then `timed`. `seed` is that of their order."""

    timed: int
    warmup: int
    seed: int


def timed_race(
    contestants: Mapping[str, Callable[[], object]],
    heats: Sequence[Sequence[str]],
    rounds: Rounds,
    steps_per_turn: int,
    bar: Callable[[int], Callable[[], object]] = lambda total: lambda: None,
    settle: Callable[[], object] = lambda: None,
    leave: Callable[[str], object] = lambda name: None,
) -> Times:
    """A race of all `heats`, the warm-up first. Collective; the same on every rank.

    `bar(total)` returns the function to call after each timed round; the rest is as in `race`.
    """
    run = partial(
        race, contestants, steps_per_turn=steps_per_turn, barrier=dist.barrier, settle=settle, leave=leave
    )
    run(schedule(heats, rounds.warmup, rounds.seed))
    order = schedule(heats, rounds.timed, rounds.seed)
    return over_ranks(gathered(run(order, on_round=bar(rounds.timed))))


@dataclass(frozen=True)
class Estimate:
    """A median over rounds and its uncertainty."""

    median: float
    low: float  #: lower end of the 95% bootstrap interval of the median
    high: float  #: upper end
    rounds: int


def estimate(samples: np.ndarray, seed: int) -> Estimate:
    """The median of one sample per round, `[rounds]`.

    The interval is a percentile bootstrap (Efron 1979), deterministic by seed.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.choice(samples, size=(RESAMPLES, len(samples)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return Estimate(float(np.median(samples)), float(low), float(high), len(samples))


def compare(seconds: np.ndarray, baseline: np.ndarray, seed: int) -> Estimate:
    """The time of one as a multiple of another's, paired round by round. See [Note: paired rounds]."""
    if len(seconds) != len(baseline) or len(seconds) == 0:
        raise ValueError(
            f"A paired ratio needs the same rounds on both sides, but they have {len(seconds)} and "
            f"{len(baseline)}; give both the times of the same, at least one, rounds."
        )
    return estimate(seconds / baseline, seed)


def median_ms(seconds: np.ndarray) -> float:
    """The median round, in milliseconds per step."""
    return float(np.median(seconds)) * 1e3


def in_ms(times: Times) -> dict[str, list[float]]:
    """Every round, in milliseconds per step."""
    return {name: [round(seconds * 1e3, 4) for seconds in times[name]] for name in times}
