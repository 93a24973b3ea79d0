"""A step as data: the activities of each rank, the history of each bucket, and figures computed from both.

**Exposed communication.** Collectives run beside backward until autograd has computed the last gradient. From then
on the rank is blocked until the buckets arrive. A bucket's share is the time for which the rank waits for this
bucket alone, in launch order, so the shares add up.

**The passage of a bucket.** Between its launch and its arrival, one cause at a time delays a bucket. It *queues*
while an earlier bucket is on the wire. Then it *waits for ranks* that have not joined. Then its bytes are *on the
wire*, which carries one bucket at a time. A rank joins when it launches the bucket. Over shared memory only a
waiting thread adds, so a rank joins at the end of its backward (or, in a long backward, `Transport.adds_after_s`
after the last launch).

**The cost of communication.** No other rank delays the rank that ends backward last: its waiting time is the cost
of communication. The other ranks wait longer, and the difference is their wait for this rank.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from minddp.core.plan import BucketPlan, BucketSpec


class Interval(NamedTuple):
    begin_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return max(0, self.end_ns - self.begin_ns)


class Activity(enum.Enum):
    """The activities of the thread that trains."""

    FORWARD = "forward"
    BUFFERS = "buffers"  # broadcast from rank 0, within forward
    LOSS = "between forward and backward"
    BACKWARD = "backward"
    EXPOSED = "blocked in communication"
    COPY_BACK = "copy averages to .grad"
    OPTIMIZER = "optimizer"
    OTHER = "other"  # without an event: batches, zero_grad, logging


@dataclass(frozen=True)
class Span:
    """A time of one activity. `bucket` is waited for, copied back or packed, else -1."""

    activity: Activity
    begin_ns: int
    end_ns: int
    bucket: int = -1

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class BucketHistory:
    """One bucket in one step on one rank. A time is `None` if the event did not happen.

    Its last gradient is that of `last_param`. The rank is blocked for `awaited_ns` until this bucket arrives. Where
    its completion was not seen, it counts as complete when its wait is over.
    """

    index: int
    nbytes: int
    last_param: int | None
    launched_ns: int | None
    completed_ns: int | None
    waited_ns: int | None
    unpacked_ns: int | None
    awaited_ns: int
    completion_was_seen: bool


class Stretch(NamedTuple):
    """A part of a bucket's time. It `moves` or waits for ranks, `exposed` while its own rank is blocked."""

    begin_ns: int
    end_ns: int
    moves: bool
    exposed: bool


class Passage(NamedTuple):
    """The causes that delay a bucket, in order; see the module's docstring."""

    queues: Interval
    waits_for_ranks: Interval
    wire: Interval


@dataclass(frozen=True)
class RankStep:
    """One step on one rank. `spans` tile it without gap or overlap; `packs` lie within backward.

    `ready_ns` gives for each parameter when its gradient arrived. All are computed at `gradients_complete_ns`.
    """

    rank: int
    number: int
    interval: Interval
    spans: tuple[Span, ...]
    packs: tuple[Span, ...]
    ready_ns: Mapping[int, int]
    gradients_complete_ns: int
    buckets: tuple[BucketHistory, ...]
    plan: BucketPlan

    @property
    def length_ns(self) -> int:
        return self.interval.length_ns

    @cached_property
    def parts_ns(self) -> dict[Activity, int]:
        """The time of each activity. They add up to the step."""
        return {a: sum(span.length_ns for span in self.spans if span.activity is a) for a in Activity}

    @property
    def backward(self) -> Interval:
        """The synchronised backward, until all gradients are computed."""
        begins_ns = [span.begin_ns for span in self.spans if span.activity is Activity.BACKWARD]
        return Interval(max(begins_ns, default=self.gradients_complete_ns), self.gradients_complete_ns)

    def last_ready_ns(self, bucket: BucketSpec) -> int:
        """When the last gradient of a bucket, which may be of another plan, arrived; without one the end."""
        times_ns = [self.ready_ns[slot.param] for slot in bucket.slots if slot.param in self.ready_ns]
        return max(times_ns, default=self.gradients_complete_ns)

    def exposed(self, intervals: Iterable[Interval]) -> list[Interval]:
        """The parts of `intervals` in which the rank was blocked, in order."""
        blocked = [span for span in self.spans if span.activity is Activity.EXPOSED]
        common = (
            Interval(max(a.begin_ns, b.begin_ns), min(a.end_ns, b.end_ns)) for a in intervals for b in blocked
        )
        return sorted(part for part in common if part.length_ns)


@dataclass(frozen=True)
class RecordedStep:
    """The same step on all the ranks that have recorded it, on one clock."""

    number: int
    ranks: tuple[RankStep, ...]
    world_size: int
    adds_after_ns: int = 0

    @property
    def length_ns(self) -> int:
        return max(rank.length_ns for rank in self.ranks)

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
        """The rank that ends backward last."""
        return max(self.ranks, key=lambda rank: rank.gradients_complete_ns)

    def waits_for_last_ns(self, rank: RankStep) -> int:
        """How long a rank waits for the rank that ends backward last, rather than for communication."""
        return max(0, rank.parts_ns[Activity.EXPOSED] - self.last.parts_ns[Activity.EXPOSED])

    def last_join(self, bucket: int) -> tuple[int, int] | None:
        """When the last rank joined, and which rank; None unless all ranks were recorded."""
        launches = [(t_ns, rank) for rank in self.ranks if (t_ns := rank.buckets[bucket].launched_ns) is not None]
        if len(launches) < self.world_size:
            return None
        latest_ns = max(t for t, _ in launches) + self.adds_after_ns
        joins = [(max(t, min(rank.gradients_complete_ns, latest_ns)), t, rank.rank) for t, rank in launches]
        join_ns, _, last = max(joins)
        return join_ns, last

    def passage(self, bucket: int, rank: RankStep) -> Passage | None:
        """The causes that delayed the bucket; None if it was not launched.

        Where not all ranks were recorded, waiting for the others counts as time on the wire.
        """
        history, last = rank.buckets[bucket], self.last_join(bucket)
        launched_ns, completed_ns = history.launched_ns, history.completed_ns
        if launched_ns is None or completed_ns is None:
            return None
        joined_ns = launched_ns if last is None else last[0]
        earlier = (rank.buckets[index].completed_ns or 0 for index in range(bucket))
        free_ns = min(max([launched_ns, *earlier]), completed_ns)  # it may overtake others
        begin_ns = min(max(joined_ns, free_ns), completed_ns)
        return Passage(
            queues=Interval(launched_ns, free_ns),
            waits_for_ranks=Interval(free_ns, begin_ns),
            wire=Interval(begin_ns, completed_ns),
        )

    def on_the_wire(self, bucket: int, rank: RankStep) -> Interval | None:
        """When the bucket's bytes can have been moving; None if it was not launched."""
        passage = self.passage(bucket, rank)
        return None if passage is None else passage.wire

    def stretches(self, bucket: int, rank: RankStep) -> list[Stretch]:
        """The parts of a bucket that are drawn. While it queues, another bucket is drawn in its place."""
        passage = self.passage(bucket, rank)
        found = []
        for part, moves in ((passage.waits_for_ranks, False), (passage.wire, True)) if passage else ():
            exposed = rank.exposed([part])
            edges = [part.begin_ns, *(t_ns for interval in exposed for t_ns in interval), part.end_ns]
            found += [Stretch(*ends, moves, ends in exposed) for ends in pairwise(edges)]
        return [stretch for stretch in found if stretch.begin_ns < stretch.end_ns]

    def overlap(self, rank: RankStep) -> float:
        """The share of the communication that does not block the rank; 1 if there was no communication."""
        wires = [wire for b in rank.buckets if (wire := self.on_the_wire(b.index, rank)) is not None]
        total_ns, exposed_ns = (sum(part.length_ns for part in parts) for parts in (wires, rank.exposed(wires)))
        return 1 - exposed_ns / total_ns if total_ns else 1.0
