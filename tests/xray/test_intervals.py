from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from minddp.xray.intervals import Interval, intersection, measure_ns, union

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda ends: Interval(*sorted(ends))))


def points(these: list[Interval]) -> set[int]:
    """An interval as the whole nanoseconds in it."""
    return {t for begin, end in these for t in range(begin, end)}


@given(intervals)
def test_a_union_has_the_same_points_and_no_two_parts_that_touch(these: list[Interval]) -> None:
    merged = union(these)
    assert points(merged) == points(these)
    assert all(left.end_ns < right.begin_ns for left, right in pairwise(merged))


@given(intervals, intervals)
def test_an_intersection_has_the_points_of_both(left: list[Interval], right: list[Interval]) -> None:
    assert points(intersection(left, right)) == points(left) & points(right)
    assert measure_ns(intersection(left, right)) == len(points(left) & points(right))
