"""A step: spans that tile it on each rank, a history of each bucket, and what follows from them. Pure.

[Note: exposed communication]
A collective runs beside backward while there is a backward. What is under way when autograd has computed its last
gradient is *exposed*: the rank has nothing left to do and waits. Per step that is the time spent waiting in launch
order; a bucket's share is the time that the rank waited for this one alone, so that the shares add up.

[Note: a bucket's passage]
From its launch to its arrival a bucket is delayed by one thing at a time. It *queues* while one before it is on the
wire. Then it *waits for ranks*: the wire is free, but not all ranks have launched it. Then its bytes are *on the
wire*. While an earlier bucket and a late rank both delay it, it queues, as it would if all ranks were there. So the
wire is never used twice, and "waits for other ranks" means the same interval everywhere: in the hatching of the
page and of the picture, in a bucket's life, in the causes of a wait.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from minddp.core.plan import BucketPlan


class Interval(NamedTuple):
    """From `begin_ns` up to `end_ns`."""

    begin_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return max(0, self.end_ns - self.begin_ns)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in time, as intervals in order that do not touch."""
    merged: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval.length_ns):
        if merged and begin <= merged[-1].end_ns:
            merged[-1] = Interval(merged[-1].begin_ns, max(end, merged[-1].end_ns))
        else:
            merged.append(Interval(begin, end))
    return merged


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The points in time that lie in both, as intervals in order that do not touch."""
    rights = union(right)
    pairs = [Interval(max(a.begin_ns, b.begin_ns), min(a.end_ns, b.end_ns)) for a in union(left) for b in rights]
    return union(pairs)


def measure_ns(intervals: Iterable[Interval]) -> int:
    """The time that lies in at least one of them."""
    return sum(interval.length_ns for interval in union(intervals))


class Activity(enum.Enum):
    """The activities of the thread that trains."""

    FORWARD = "forward"
    BUFFERS = "buffers"  # rank 0's are broadcast, within forward
    REBUILD = "rebuild"  # of the buckets, within forward
    LOSS = "loss"  # from the end of forward to the beginning of backward
    BACKWARD = "backward"
    EXPOSED = "exposed communication"  # see [Note: exposed communication]
    COPY_BACK = "copy back"  # averages go where the optimizer reads them
    OPTIMIZER = "optimizer"
    OTHER = "other"  # everything without an event: data, zero_grad, logging


@dataclass(frozen=True)
class Span:
    """A time of one activity; `bucket` is the one that is waited for, copied back or packed, else -1."""

    activity: Activity
    begin_ns: int
    end_ns: int
    bucket: int = -1

    @property
    def interval(self) -> Interval:
        return Interval(self.begin_ns, self.end_ns)

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class BucketHistory:
    """One bucket in one step on one rank. A time is `None` if that did not happen.

    It `fills` from its first gradient to its last, that of `last_param`. `ready_ns`: all gradients are packed.
    `awaited_ns`: how long the rank stood still for this bucket.
    """

    index: int
    nbytes: int
    fills: Interval | None = None
    last_param: int | None = None
    ready_ns: int | None = None
    launched_ns: int | None = None
    completed_ns: int | None = None
    waited_ns: int | None = None
    unpacked_ns: int | None = None
    awaited_ns: int = 0
    completion_was_seen: bool = True

    @property
    def held_ns(self) -> int:
        """How long it was ready but not launched, since a bucket before it in the plan was not ready."""
        if self.ready_ns is None or self.launched_ns is None:
            return 0
        return max(0, self.launched_ns - self.ready_ns)


class Passage(NamedTuple):
    """What delayed a bucket on one rank from its launch on. See [Note: a bucket's passage].

    `wire` is None if it never arrived; then it waits to the end of the step, for an unknown reason.
    """

    queues: Interval
    waits_for_ranks: Interval
    wire: Interval | None


@dataclass(frozen=True)
class RankStep:
    """One step on one rank. `spans` tile it without gap or overlap; `packs` lie within backward.

    `ready_ns` gives for each parameter when its gradient arrived; at `gradients_complete_ns` backward has nothing
    left to compute. A step that ended with an error, or whose backward has no recorded end, is not `complete`.
    """

    rank: int
    number: int
    interval: Interval
    spans: tuple[Span, ...]
    packs: tuple[Span, ...]
    ready_ns: Mapping[int, int]
    gradients_complete_ns: int | None
    buckets: tuple[BucketHistory, ...]
    plan: BucketPlan
    complete: bool

    @property
    def length_ns(self) -> int:
        return self.interval.length_ns

    @cached_property
    def parts_ns(self) -> dict[Activity, int]:
        """How long each activity took; together they are the step."""
        return {a: sum(span.length_ns for span in self.spans if span.activity is a) for a in Activity}

    @property
    def waits(self) -> list[Span]:
        """The times in which the rank stood still for communication."""
        return [span for span in self.spans if span.activity is Activity.EXPOSED]

    def exposed(self, intervals: Iterable[Interval]) -> list[Interval]:
        """The parts of `intervals` in which the rank stood still."""
        return intersection(intervals, [span.interval for span in self.waits])

    def hidden_ns(self, of: Interval) -> int:
        """How much of an interval lies beside backward, rather than after it."""
        end_ns = of.end_ns if self.gradients_complete_ns is None else self.gradients_complete_ns
        return Interval(of.begin_ns, min(of.end_ns, end_ns)).length_ns


@dataclass(frozen=True)
class Step:
    """The same step on all the ranks that have recorded it, on one clock."""

    number: int
    ranks: tuple[RankStep, ...]
    world_size: int

    @property
    def complete(self) -> bool:
        return all(rank.complete for rank in self.ranks)

    @property
    def slowest(self) -> RankStep:
        return max(self.ranks, key=lambda rank: rank.length_ns)

    @property
    def length_ns(self) -> int:
        return self.slowest.length_ns

    @property
    def begin_ns(self) -> int:
        return min(rank.interval.begin_ns for rank in self.ranks)

    @property
    def end_ns(self) -> int:
        return max(rank.interval.end_ns for rank in self.ranks)

    @property
    def plan(self) -> BucketPlan:
        return self.ranks[0].plan

    def last_launch(self, bucket: int) -> tuple[int, int] | None:
        """When the last rank launched the bucket, and which rank that was. None if not all were recorded.

        The collective cannot begin before that.
        """
        launches = [(rank.buckets[bucket].launched_ns, rank.rank) for rank in self.ranks]
        known = [(t_ns, rank) for t_ns, rank in launches if t_ns is not None]
        return max(known) if len(known) == self.world_size else None

    def passage(self, bucket: int, rank: RankStep) -> Passage | None:
        """What delayed the bucket from its launch to its arrival. None if it was not launched.

        Where not all ranks were recorded, waiting for the others looks like moving bytes.
        """
        history, last = rank.buckets[bucket], self.last_launch(bucket)
        launched_ns, completed_ns = history.launched_ns, history.completed_ns
        if launched_ns is None:
            return None
        end_ns = rank.interval.end_ns if completed_ns is None else completed_ns
        all_launched_ns = launched_ns if last is None else last[0]
        earlier = (rank.buckets[index].completed_ns or 0 for index in range(bucket))
        free_ns = min(max([launched_ns, *earlier]), end_ns)  # it may overtake others
        begin_ns = end_ns if completed_ns is None else min(max(all_launched_ns, free_ns), end_ns)
        wire = None if completed_ns is None else Interval(begin_ns, end_ns)
        return Passage(Interval(launched_ns, free_ns), Interval(free_ns, begin_ns), wire)

    def on_the_wire(self, bucket: int, rank: RankStep) -> Interval | None:
        """When the bucket's bytes can have been moving; None if it was not launched, or never completed."""
        passage = self.passage(bucket, rank)
        return None if passage is None else passage.wire

    def overlap(self, rank: RankStep) -> float:
        """The share of the communication for which the rank did not stand still; 1 if there was none."""
        wires = [wire for b in rank.buckets if (wire := self.on_the_wire(b.index, rank)) is not None]
        return 1 - measure_ns(rank.exposed(wires)) / measure_ns(wires) if measure_ns(wires) else 1.0


def typical(steps: Sequence[Step]) -> Step:
    """The step that stands for the others: the one of median length among those with the final plan.

    Raises:
        ValueError: there is no step at all.
    """
    if not steps:
        raise ValueError(
            "No step was recorded: there must be a forward and a backward that is synchronised within the "
            "recording. Put `with minddp.xray(ddp)` around at least one whole step."
        )
    candidates = [step for step in steps if step.complete] or list(steps)
    final = [step for step in candidates if step.plan.buckets == candidates[-1].plan.buckets]
    median = statistics.median_low(step.length_ns for step in final)
    return next(step for step in final if step.length_ns == median)
