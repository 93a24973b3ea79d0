"""Why does a rank stand still after backward? Each nanosecond of waiting has one cause. Pure."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from minddp.xray.intervals import Interval
from minddp.xray.timeline import Activity, RankStep, Step


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

    rank: int
    bucket: int
    ns_by_cause: dict[Cause, int]

    @property
    def length_ns(self) -> int:
        return sum(self.ns_by_cause.values())

    @property
    def main_cause(self) -> Cause:
        return max(self.ns_by_cause, key=lambda cause: self.ns_by_cause[cause])


def waits_of(step: Step, rank: RankStep) -> list[Wait]:
    """The waits of one rank, in order; together they are its exposed communication."""
    by_bucket: dict[int, Counter[Cause]] = {}
    for span in rank.spans:
        if span.activity is Activity.EXPOSED:
            by_bucket.setdefault(span.bucket, Counter()).update(_causes(step, rank, span.bucket, span.interval))
    return [Wait(rank.rank, bucket, dict(causes)) for bucket, causes in by_bucket.items()]


def worst_wait(step: Step) -> Wait | None:
    """The bucket that hurts most, on the rank where it does. None if nobody waited for any."""
    waits = [wait for rank in step.ranks for wait in waits_of(step, rank) if wait.bucket >= 0]
    return max(waits, key=lambda wait: wait.length_ns, default=None)


def total_by_cause(step: Step, rank: RankStep) -> dict[Cause, int]:
    total: Counter[Cause] = Counter()
    for wait in waits_of(step, rank):
        total.update(wait.ns_by_cause)
    return {cause: total[cause] for cause in Cause}


def _causes(step: Step, rank: RankStep, bucket: int, wait: Interval) -> dict[Cause, int]:
    """Cut a wait where the bucket passed from one stage to the next."""
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
