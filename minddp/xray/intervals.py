"""Arithmetic of time intervals: how long is something true, and how much of that while something else is?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


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
    lefts, rights = union(left), union(right)
    common, i, j = [], 0, 0
    while i < len(lefts) and j < len(rights):
        both = Interval(max(lefts[i].begin_ns, rights[j].begin_ns), min(lefts[i].end_ns, rights[j].end_ns))
        if both.length_ns:
            common.append(both)
        if lefts[i].end_ns <= rights[j].end_ns:
            i += 1
        else:
            j += 1
    return common


def measure_ns(intervals: Iterable[Interval]) -> int:
    """How much time lies in at least one of them."""
    return sum(interval.length_ns for interval in union(intervals))
