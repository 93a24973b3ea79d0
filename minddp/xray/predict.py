"""The same step under another plan: a cost model fitted to the recording, and a simulation with it. Pure.

[Note: the cost model]
A message of n bytes takes latency + n / bandwidth, from the moment at which all ranks have launched it and the one
before it is through. Gradients become ready when they did in the recorded step; buckets leave in plan order; the
rest of the step stays as it was. What this leaves out: that communication slows down backward where both need the
same cores, what a bucket costs the thread that trains, and that small messages may travel side by side. So it says
something about plans that are not too far from the recorded one; predicting that one, too, shows how far to trust it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minddp.xray.recording import Layout
from minddp.xray.timeline import RankStep, Step


class Transfer(NamedTuple):
    """A message of the recording and how long it was on the wire."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class CostModel:
    """See [Note: the cost model]. `sizes` tells how many different sizes it was fitted to."""

    latency_s: float
    bytes_per_s: float
    messages: int
    sizes: int

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.bytes_per_s

    @property
    def separates_latency(self) -> bool:
        """Messages of one size do not tell what of their time was latency; it then counts as none."""
        return self.sizes > 1


def transfers(steps: Sequence[Step]) -> list[Transfer]:
    """How long each message of each step took, where that is known: on each rank that saw it complete."""
    return [transfer for step in steps for rank in step.ranks for transfer in _transfers_of(step, rank)]


def _transfers_of(step: Step, rank: RankStep) -> Iterator[Transfer]:
    for bucket in rank.buckets:
        wire = step.on_the_wire(bucket.index, rank)
        if wire is not None and wire.length_ns:
            yield Transfer(bucket.nbytes, wire.length_ns / 1e9)


def fit(observed: Sequence[Transfer]) -> CostModel | None:
    """Latency and bandwidth that explain best, by relative error, the median time of each size.

    None if nothing was observed.
    """
    times_of: dict[int, list[float]] = {}
    for nbytes, seconds in observed:
        if nbytes > 0:
            times_of.setdefault(nbytes, []).append(seconds)
    if not times_of:
        return None
    sizes = np.array(sorted(times_of), dtype=np.float64)
    medians = np.array([statistics.median(times_of[int(nbytes)]) for nbytes in sizes])
    latency_s, seconds_per_byte = _non_negative_line(sizes, medians)
    return CostModel(latency_s, 1 / seconds_per_byte, len(observed), len(sizes))


def _non_negative_line(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """(a, b) with a >= 0, b > 0 of least relative error in a + b * sizes = seconds."""
    a, b = 0.0, 0.0
    if len(sizes) > 1:
        design = np.stack([1 / seconds, sizes / seconds], axis=1)
        (a, b), *_ = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)
    if a < 0 or b <= 0:  # the nearest point with a = 0
        ratio = sizes / seconds
        a, b = 0.0, float(ratio.sum() / (ratio**2).sum())
    return float(a), float(b)


@dataclass(frozen=True)
class PredictedBucket:
    """A bucket on one rank; `begin_ns`, when its bytes begin to move, and `end_ns` are equal on all ranks."""

    index: int
    nbytes: int
    ready_ns: int
    launched_ns: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class PredictedRank:
    """One rank's step: `spans` of the recorded step up to `gradients_complete_ns` hold; then it waits, then the rest."""

    rank: int
    begin_ns: int
    gradients_complete_ns: int
    exposed_ns: int
    rest_ns: int
    buckets: tuple[PredictedBucket, ...]

    @property
    def length_ns(self) -> int:
        return self.gradients_complete_ns - self.begin_ns + self.exposed_ns + self.rest_ns


@dataclass(frozen=True)
class Prediction:
    """What the step would be with `layout`."""

    layout: Layout
    ranks: tuple[PredictedRank, ...]

    @property
    def length_ns(self) -> int:
        return max(rank.length_ns for rank in self.ranks)

    @property
    def exposed_ns(self) -> int:
        return max(self.ranks, key=lambda rank: rank.length_ns).exposed_ns


def simulate(step: Step, layout: Layout, cost: CostModel) -> Prediction:
    """`step`, which must be complete, with its gradients in the buckets of `layout`."""
    launches = [_launches(rank, layout) for rank in step.ranks]
    wire: list[tuple[int, int]] = []
    for index, bucket in enumerate(layout.buckets):
        all_launched_ns = max(launched[index][1] for launched in launches)
        begin_ns = max(all_launched_ns, wire[-1][1]) if wire else all_launched_ns
        wire.append((begin_ns, begin_ns + round(cost.seconds(bucket.nbytes) * 1e9)))
    return Prediction(
        layout, tuple(_rank(r, layout, own, wire) for r, own in zip(step.ranks, launches, strict=True))
    )


def _launches(rank: RankStep, layout: Layout) -> list[tuple[int, int]]:
    """When each bucket would be ready, and when launched: in plan order."""
    times: list[tuple[int, int]] = []
    for bucket in layout.buckets:
        known = [rank.ready_ns[param] for param in bucket.params if param in rank.ready_ns]
        ready_ns = max(known, default=_complete_ns(rank))
        times.append((ready_ns, max(ready_ns, times[-1][1]) if times else ready_ns))
    return times


def _rank(
    rank: RankStep, layout: Layout, launches: Sequence[tuple[int, int]], wire: Sequence[tuple[int, int]]
) -> PredictedRank:
    complete_ns = _complete_ns(rank)
    recorded_wait_ns = sum(span.length_ns for span in rank.waits)
    return PredictedRank(
        rank=rank.rank,
        begin_ns=rank.interval.begin_ns,
        gradients_complete_ns=complete_ns,
        exposed_ns=max(0, wire[-1][1] - complete_ns) if wire else 0,
        rest_ns=rank.interval.end_ns - complete_ns - recorded_wait_ns,
        buckets=tuple(
            PredictedBucket(index, bucket.nbytes, *launches[index], *wire[index])
            for index, bucket in enumerate(layout.buckets)
        ),
    )


def _complete_ns(rank: RankStep) -> int:
    complete_ns = rank.gradients_complete_ns
    assert complete_ns is not None, "a complete step has the end of its backward"
    return complete_ns
