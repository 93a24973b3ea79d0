"""The same step under another plan: a link fitted to the recording, and a simulation with it. Pure.

[Note: what is predicted]
A message costs what `tune.Link` says, from the moment at which all ranks have launched it and the one before is
through. Gradients become ready when they did in the recorded step; buckets leave in plan order; the rest of the
step stays as it was. What this leaves out: that communication slows down backward where both need the same cores,
what a bucket costs the thread that trains, and that small messages may travel side by side. So it says something
about plans that are not too far from the recorded one; predicting that one, too, shows how far to trust it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minddp.forecast.link import Link
from minddp.xray.recording import Layout
from minddp.xray.timeline import Activity, RankStep, Span, Step


class Transfer(NamedTuple):
    """A message of the recording and how long it was on the wire."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A link as the recorded messages show it: how many there were, and of how many different sizes."""

    link: Link
    messages: int
    sizes: int

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


def fit(observed: Sequence[Transfer]) -> Fit | None:
    """The link that explains best the median time of each size. None if nothing was observed."""
    times_of: dict[int, list[float]] = {}
    for nbytes, seconds in observed:
        if nbytes > 0:
            times_of.setdefault(nbytes, []).append(seconds)
    if not times_of:
        return None
    medians = [(nbytes, statistics.median(times)) for nbytes, times in times_of.items()]
    (nbytes, seconds), *others = medians
    link = Link.fitted(medians) if others else Link(0.0, nbytes / seconds)
    return Fit(link, len(observed), len(medians))


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
    """One rank's step: as recorded up to the end of backward, then it waits and copies in turn, then the rest."""

    rank: int
    gradients_complete_ns: int
    after: tuple[Span, ...]
    rest_ns: int
    length_ns: int
    buckets: tuple[PredictedBucket, ...]

    @property
    def exposed_ns(self) -> int:
        return sum(span.length_ns for span in self.after if span.activity is Activity.EXPOSED)


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


def simulate(step: Step, layout: Layout, link: Link) -> Prediction:
    """`step`, which must be complete, with its gradients in the buckets of `layout`."""
    launches = [_launches(rank, layout) for rank in step.ranks]
    wire: list[tuple[int, int]] = []
    for index, bucket in enumerate(layout.buckets):
        all_launched_ns = max(launched[index][1] for launched in launches)
        begin_ns = max(all_launched_ns, wire[-1][1]) if wire else all_launched_ns
        wire.append((begin_ns, begin_ns + round(link.seconds(bucket.nbytes) * 1e9)))
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
    recorded_ns = rank.parts_ns[Activity.EXPOSED] + rank.parts_ns[Activity.COPY_BACK]
    rest_ns = rank.interval.end_ns - complete_ns - recorded_ns
    after = tuple(_waits_and_copies(rank, layout, complete_ns, [end_ns for _, end_ns in wire]))
    return PredictedRank(
        rank=rank.rank,
        gradients_complete_ns=complete_ns,
        after=after,
        rest_ns=rest_ns,
        length_ns=complete_ns - rank.interval.begin_ns + sum(span.length_ns for span in after) + rest_ns,
        buckets=tuple(
            PredictedBucket(index, bucket.nbytes, *launches[index], *wire[index])
            for index, bucket in enumerate(layout.buckets)
        ),
    )


def _waits_and_copies(rank: RankStep, layout: Layout, complete_ns: int, ends_ns: Sequence[int]) -> Iterator[Span]:
    """From the end of backward on: for each bucket in order, wait until it is there, and copy it back."""
    copy_ns_per_byte = rank.parts_ns[Activity.COPY_BACK] / max(1, layout.nbytes)
    now_ns = complete_ns
    for index, (bucket, end_ns) in enumerate(zip(layout.buckets, ends_ns, strict=True)):
        if end_ns > now_ns:
            yield Span(Activity.EXPOSED, now_ns, end_ns, index)
            now_ns = end_ns
        copied_ns = now_ns + round(copy_ns_per_byte * bucket.nbytes)
        if copied_ns > now_ns:
            yield Span(Activity.COPY_BACK, now_ns, copied_ns, index)
            now_ns = copied_ns


def _complete_ns(rank: RankStep) -> int:
    complete_ns = rank.gradients_complete_ns
    assert complete_ns is not None, "a complete step has the end of its backward"
    return complete_ns
