"""A step: spans that tile it on each rank, a history of each bucket, and what follows from them. Pure.

[Note: exposed communication]
A collective runs beside backward while there is a backward. What is under way when autograd has computed its last
gradient is *exposed*: the rank has nothing left to do and waits. Per step that is the time spent waiting in launch
order; a bucket's share is the time that the rank waited for this one alone, so that the shares add up.

[Note: a bucket's passage]
From its launch to its arrival a bucket is delayed by one thing at a time. It *queues* while one before it is on the
wire. Then it *waits for ranks*: the wire is free, but not all ranks have joined. Then its bytes are *on the wire*.
While an earlier bucket and a late rank both delay it, it queues, as it would if all ranks were there. So the wire
is never used twice, and "waits for ranks" means the same interval everywhere.

A rank joins when it launches the bucket; over shared memory, where no thread but the one that waits adds, when its
backward is over (or, in a long backward, some time after the last launch: `Transport.adds_after_s`).

[Note: the cost of communication]
The rank that ends backward last is the one that no other delays: what it waits for afterwards is what communication
costs the step. What the others wait beyond that is for this rank.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from minddp.core.plan import BucketPlan

NEGLIGIBLE = 0.01  # of a step: shorter waits are not mentioned


class Interval(NamedTuple):
    begin_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return max(0, self.end_ns - self.begin_ns)


class Activity(enum.Enum):
    """The activities of the thread that trains."""

    FORWARD = "forward"
    BUFFERS = "buffers"  # rank 0's are broadcast, within forward
    REBUILD = "rebuild"  # of the buckets, within forward
    LOSS = "after forward"  # until backward begins
    BACKWARD = "backward"
    EXPOSED = "stands still"  # see [Note: exposed communication]
    COPY_BACK = "copy back"  # averages go where the optimizer reads them
    OPTIMIZER = "optimizer"
    DATA = "data loader"  # a `DataLoader` is waited for
    OTHER = "other"  # everything without an event: zero_grad, logging


OF_MODULES = (Activity.FORWARD, Activity.BACKWARD, Activity.EXPOSED, Activity.COPY_BACK)


@dataclass(frozen=True)
class Span:
    """A time of one activity, of a `module` of several; `bucket` is waited for, copied back or packed, else -1."""

    activity: Activity
    begin_ns: int
    end_ns: int
    bucket: int = -1
    module: str = ""

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


class Pass(NamedTuple):
    """One module's synchronised backward in a step of several; its buckets; when its gradients were complete."""

    module: str
    buckets: range
    complete_ns: int | None


class Stretch(NamedTuple):
    """A part of a bucket's time: its bytes move or it waits for ranks, its own rank stands still or does not."""

    begin_ns: int
    end_ns: int
    moves: bool
    exposed: bool


class Passage(NamedTuple):
    """What delayed a bucket on one rank; `wire` is None if it never arrived. See [Note: a bucket's passage]."""

    queues: Interval
    waits_for_ranks: Interval
    wire: Interval | None


@dataclass(frozen=True)
class RankStep:
    """One step on one rank. `spans` tile it without gap or overlap; `packs` lie within backward.

    `ready_ns` gives for each parameter when its gradient arrived; at `gradients_complete_ns` backward has nothing
    left to compute. A step that ended with an error, or whose backward has no recorded end, is not `complete`.
    Where there are several modules, it has `passes`, and the buckets are theirs one after the other. `peak_bytes`:
    the most memory that its process had taken by the end of the recording; 0 if that is not known. `launch_ns` and
    `crowded_ns` are those of its recording.
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
    passes: tuple[Pass, ...] = ()
    peak_bytes: int = 0
    launch_ns: float = 0.0
    crowded_ns: float = 0.0

    @property
    def length_ns(self) -> int:
        return self.interval.length_ns

    def pass_of(self, bucket: int) -> Pass:
        """The backward that a bucket is of."""
        one = Pass("", range(len(self.buckets)), self.gradients_complete_ns)
        return next((one for one in self.passes if bucket in one.buckets), one)

    def module_ns(self, activity: Activity, module: str) -> int:
        return sum(span.length_ns for span in self.spans if (span.activity, span.module) == (activity, module))

    @cached_property
    def parts_ns(self) -> dict[Activity, int]:
        """How long each activity took; together they are the step."""
        return {a: sum(span.length_ns for span in self.spans if span.activity is a) for a in Activity}

    def exposed(self, intervals: Iterable[Interval]) -> list[Interval]:
        """The parts of `intervals` in which the rank stood still, in order."""
        return sorted(
            Interval(max(a.begin_ns, b.begin_ns), min(a.end_ns, b.end_ns))
            for a in intervals
            for b in self._still
            if max(a.begin_ns, b.begin_ns) < min(a.end_ns, b.end_ns)
        )

    @cached_property
    def _still(self) -> list[Span]:
        return [span for span in self.spans if span.activity is Activity.EXPOSED]

    def hidden_ns(self, of: Interval, bucket: int) -> int:
        """How much of a bucket's interval lies beside backward, rather than after it."""
        complete_ns = self.pass_of(bucket).complete_ns
        end_ns = of.end_ns if complete_ns is None else complete_ns
        return Interval(of.begin_ns, min(of.end_ns, end_ns)).length_ns


@dataclass(frozen=True)
class Step:
    """The same step on all the ranks that have recorded it, on one clock."""

    number: int
    ranks: tuple[RankStep, ...]
    world_size: int
    adds_after_ns: int = 0

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

    @property
    def last(self) -> RankStep:
        """It ends backward last, or of several stands still least. See [Note: the cost of communication]."""
        if self.ranks[0].passes:
            return min(self.ranks, key=lambda rank: rank.parts_ns[Activity.EXPOSED])
        return max(self.ranks, key=lambda rank: rank.gradients_complete_ns or 0)

    def waits_for_last_ns(self, rank: RankStep) -> int:
        """How long a rank stands still for the one that ends backward last, rather than for communication."""
        still = Activity.EXPOSED
        return max(0, rank.parts_ns[still] - self.last.parts_ns[still])

    @property
    def waits_longest(self) -> RankStep:
        """The rank that stands still longest for the one that ends backward last."""
        return max(self.ranks, key=self.waits_for_last_ns)

    @property
    def late_rank(self) -> int | None:
        """The rank that another one waits for, if for a time that is worth mentioning."""
        waits_ns = self.waits_for_last_ns(self.waits_longest)
        return self.last.rank if waits_ns >= NEGLIGIBLE * self.length_ns else None

    def last_join(self, bucket: int) -> tuple[int, int] | None:
        """When the last rank joined, and which: see [Note: a bucket's passage]. None if not all were recorded."""
        launches = [(rank.buckets[bucket].launched_ns, rank) for rank in self.ranks]
        known = [(t_ns, rank) for t_ns, rank in launches if t_ns is not None]
        if len(known) < self.world_size:
            return None
        latest_ns = max(t_ns for t_ns, _ in known) + self.adds_after_ns
        completes = [rank.pass_of(bucket).complete_ns or 0 for _, rank in known]
        joins = [
            (max(t, min(complete_ns, latest_ns)), t, rank.rank)
            for (t, rank), complete_ns in zip(known, completes, strict=True)
        ]
        join_ns, _, last = max(joins)
        return join_ns, last

    def passage(self, bucket: int, rank: RankStep) -> Passage | None:
        """What delayed the bucket from its launch to its arrival. None if it was not launched.

        Where not all ranks were recorded, waiting for the others looks like moving bytes.
        """
        history, last = rank.buckets[bucket], self.last_join(bucket)
        launched_ns, completed_ns = history.launched_ns, history.completed_ns
        if launched_ns is None:
            return None
        end_ns = rank.interval.end_ns if completed_ns is None else completed_ns
        joined_ns = launched_ns if last is None else last[0]
        earlier = (rank.buckets[index].completed_ns or 0 for index in range(bucket))
        free_ns = min(max([launched_ns, *earlier]), end_ns)  # it may overtake others
        begin_ns = end_ns if completed_ns is None else min(max(joined_ns, free_ns), end_ns)
        wire = None if completed_ns is None else Interval(begin_ns, end_ns)
        return Passage(Interval(launched_ns, free_ns), Interval(free_ns, begin_ns), wire)

    def on_the_wire(self, bucket: int, rank: RankStep) -> Interval | None:
        """When the bucket's bytes can have been moving; None if it was not launched, or never completed."""
        passage = self.passage(bucket, rank)
        return None if passage is None else passage.wire

    def stretches(self, bucket: int, rank: RankStep) -> list[Stretch]:
        """What is drawn of a bucket in a rank's lane; nothing while it queues, for then the lane is another's."""
        passage = self.passage(bucket, rank)
        found = []
        for part, moves in ((passage.waits_for_ranks, False), (passage.wire, True)) if passage else ():
            if part is not None:
                exposed = rank.exposed([part])
                edges = [part.begin_ns, *(t_ns for interval in exposed for t_ns in interval), part.end_ns]
                found += [Stretch(*ends, moves, ends in exposed) for ends in pairwise(edges)]
        return [stretch for stretch in found if stretch.begin_ns < stretch.end_ns]

    def overlap(self, rank: RankStep) -> float:
        """The share of the communication for which the rank did not stand still; 1 if there was none."""
        wires = [wire for b in rank.buckets if (wire := self.on_the_wire(b.index, rank)) is not None]
        total_ns, exposed_ns = (sum(part.length_ns for part in parts) for parts in (wires, rank.exposed(wires)))
        return 1 - exposed_ns / total_ns if total_ns else 1.0


def spread_ns(steps: Sequence[Step]) -> int:
    """The middle half of the steps' lengths lies within this; 0 for one step."""
    low, _, high = statistics.quantiles([step.length_ns for step in steps] * 2, method="inclusive")
    return round(high - low)
