"""Offsets between clocks, from events that both have seen."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minddp.tools.xray.clock_offset import (
    ClockOffset,
    RoundTrip,
    answer_for_offset,
    ask_for_offset,
    clock_identity,
    clock_offset,
)
from tests.ranks import RankPool

_times = st.integers(0, 10**6)


def test_the_quickest_round_trip_has_the_smallest_error() -> None:
    trips = [RoundTrip(0, 1_000_900, 1_000), RoundTrip(2_000, 1_002_060, 2_100)]
    assert clock_offset(trips) == ClockOffset(1_000_010, 50)


def test_two_round_trips_of_unequal_ways_bound_each_other() -> None:
    """The first answer is written at once, the second at the last moment: together they give the exact offset."""
    assert clock_offset([RoundTrip(0, 5_000, 100), RoundTrip(200, 5_300, 300)]) == ClockOffset(5_000, 0)


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(st.integers(0, 10**9), _times, _times), min_size=1),
)
def test_the_true_offset_lies_within_the_error(offset: int, events: list[tuple[int, int, int]]) -> None:
    trips = [RoundTrip(event - before, event + offset, event + after) for event, before, after in events]
    found = clock_offset(trips)
    assert found.error_ns is not None
    assert abs(found.offset_ns - offset) <= found.error_ns


def ask_rank_0(rank: int, world_size: int) -> ClockOffset | None:
    store = dist.PrefixStore("test_clocks", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroupGloo(store, rank, world_size, datetime.timedelta(seconds=60))
    if rank == 0:
        for peer in range(1, world_size):
            answer_for_offset(group, peer)
        return None
    return ask_for_offset(group, 0)


def test_offsets_between_processes_of_one_machine_are_zero_within_their_error(
    ranks: Callable[[int], RankPool],
) -> None:
    for found in ranks(2).run(ask_rank_0, 2)[1:]:
        assert abs(found.offset_ns) <= found.error_ns


def identity(rank: int) -> str:
    return clock_identity()


def test_processes_of_one_machine_read_one_clock(ranks: Callable[[int], RankPool]) -> None:
    assert set(ranks(2).run(identity)) == {clock_identity()}
