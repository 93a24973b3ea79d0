"""What is drawn of a bucket on its way: stretches in which it waits or moves, at a cost or without. Pure.

The page and the picture draw these, so that they cannot tell different stories of one step.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from minddp.xray.intervals import Interval, intersection
from minddp.xray.timeline import RankStep, Span, Step


class Stretch(NamedTuple):
    """A part of a bucket's time: do its bytes move, or does it wait for other ranks? Does its rank stand still?"""

    begin_ns: int
    end_ns: int
    moves: bool
    exposed: bool

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns


def stretches_of(step: Step, rank: RankStep, bucket: int) -> list[Stretch]:
    """What a rank's lane shows of a bucket; nothing while it queues, for then the lane is another's.

    See [Note: a bucket's passage].
    """
    passage = step.passage(bucket, rank)
    if passage is None:
        return []
    waits = cut(passage.waits_for_ranks, rank.waits, moves=False)
    return [*waits, *(cut(passage.wire, rank.waits, moves=True) if passage.wire else [])]


def cut(whole: Interval, waits: Iterable[Span], *, moves: bool) -> list[Stretch]:
    """A time of a bucket, cut where its rank begins or ceases to stand still."""
    exposed = intersection([whole], [span.interval for span in waits])
    cuts = [whole.begin_ns, *(t_ns for interval in exposed for t_ns in interval), whole.end_ns]
    return [
        Stretch(begin_ns, end_ns, moves, (begin_ns, end_ns) in exposed)
        for begin_ns, end_ns in pairwise(cuts)
        if begin_ns < end_ns
    ]
