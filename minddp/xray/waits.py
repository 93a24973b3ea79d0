"""The waiting of buckets and of ranks, by what it is for. Pure.

The page and the picture draw the stretches of a bucket, the sentences count the causes of a rank's waits. Both come
from one [Note: a bucket's passage], so they agree.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from minddp.xray.timeline import Interval, RankStep, Step


class Stretch(NamedTuple):
    """A part of a bucket's time: its bytes move or it waits for ranks, its own rank stands still or does not."""

    begin_ns: int
    end_ns: int
    moves: bool
    exposed: bool


def stretches_of(step: Step, rank: RankStep, bucket: int) -> list[Stretch]:
    """What is drawn of a bucket in a rank's lane; nothing while it queues, for then the lane is another's."""
    passage = step.passage(bucket, rank)
    if passage is None:
        return []
    waits = stretches(passage.waits_for_ranks, rank, moves=False)
    return [*waits, *(stretches(passage.wire, rank, moves=True) if passage.wire else [])]


def stretches(whole: Interval, rank: RankStep, *, moves: bool) -> list[Stretch]:
    """A time of a bucket, divided where its rank begins or ceases to stand still."""
    exposed = rank.exposed([whole])
    edges = [whole.begin_ns, *(t_ns for interval in exposed for t_ns in interval), whole.end_ns]
    return [
        Stretch(begin_ns, end_ns, moves, (begin_ns, end_ns) in exposed)
        for begin_ns, end_ns in pairwise(edges)
        if begin_ns < end_ns
    ]


class Cause(enum.Enum):
    """What a rank waits for, in the order in which a bucket goes through it. See [Note: a bucket's passage]."""

    EARLIER_BUCKET = "a bucket before it is still on the wire"
    OTHER_RANK = "another rank has not launched the bucket yet"
    WIRE = "its bytes are on the wire"
    WAKING = "it has arrived, but the rank has not gone on yet"
    UNKNOWN = "not for a bucket: usage of parameters, futures of hooks"


@dataclass(frozen=True)
class Wait:
    """All the time that one rank stood still for one bucket, by cause."""

    rank: RankStep
    bucket: int
    ns_by_cause: dict[Cause, int]

    @property
    def length_ns(self) -> int:
        return sum(self.ns_by_cause.values())


def waits_of(step: Step, rank: RankStep) -> list[Wait]:
    """The waits of one rank, in order; together they are its exposed communication."""
    by_bucket: dict[int, Counter[Cause]] = {}
    for span in rank.waits:
        by_bucket.setdefault(span.bucket, Counter()).update(_causes(step, rank, span.bucket, span.interval))
    return [Wait(rank, bucket, dict(causes)) for bucket, causes in by_bucket.items()]


def worst_wait(step: Step) -> Wait | None:
    """The longest wait of any rank for a bucket. None if no rank waited for one."""
    waits = [wait for rank in step.ranks for wait in waits_of(step, rank) if wait.bucket >= 0]
    return max(waits, key=lambda wait: wait.length_ns, default=None)


def total_by_cause(step: Step, rank: RankStep) -> dict[Cause, int]:
    waits = waits_of(step, rank)
    return {cause: sum(wait.ns_by_cause.get(cause, 0) for wait in waits) for cause in Cause}


def _causes(step: Step, rank: RankStep, bucket: int, wait: Interval) -> dict[Cause, int]:
    """A wait, divided where the bucket passed from one stage to the next."""
    passage = step.passage(bucket, rank) if bucket >= 0 else None
    if passage is None or passage.wire is None:
        return {Cause.UNKNOWN: wait.length_ns}
    ends = {
        Cause.EARLIER_BUCKET: passage.queues.end_ns,
        Cause.OTHER_RANK: passage.waits_for_ranks.end_ns,
        Cause.WIRE: passage.wire.end_ns,
        Cause.WAKING: wait.end_ns,
    }
    lengths, since_ns = {}, wait.begin_ns
    for cause, end_ns in ends.items():
        until_ns = min(max(end_ns, since_ns), wait.end_ns)
        lengths[cause], since_ns = until_ns - since_ns, until_ns
    return lengths
