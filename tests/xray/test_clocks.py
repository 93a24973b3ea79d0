from __future__ import annotations

import datetime
from collections.abc import Callable

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minddp.xray.clocks import RoundTrip, answer, ask, clock_identity, offset_from
from minddp.xray.recording import ClockOffset
from tests.ranks import RankPool


def test_the_quickest_round_trip_decides() -> None:
    slow, quick = RoundTrip(0, 1_000_900, 1_000), RoundTrip(2_000, 1_002_060, 2_100)
    assert offset_from([slow, quick]) == ClockOffset(1_000_010, 50)


@given(
    st.integers(-(10**12), 10**12),
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1),
)
def test_the_true_offset_lies_within_the_error(offset: int, trips: list[tuple[int, int, int]]) -> None:
    """However unequally the two ways take their time."""
    seen = [RoundTrip(sent, sent + there + offset, sent + there + back) for sent, there, back in trips]
    found = offset_from(seen)
    assert found.error_ns is not None
    assert abs(found.offset_ns - offset) <= found.error_ns


def ask_rank_0(rank: int, world_size: int) -> ClockOffset | None:
    store = dist.PrefixStore("test_clocks", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroupGloo(store, rank, world_size, datetime.timedelta(seconds=20))
    if rank == 0:
        for peer in range(1, world_size):
            answer(group, peer)
        return None
    return ask(group, 0)


def test_offsets_between_processes_of_one_machine_are_zero_within_their_error(
    ranks: Callable[[int], RankPool],
) -> None:
    for found in ranks(2).run(ask_rank_0, 2)[1:]:
        assert abs(found.offset_ns) <= found.error_ns


def test_processes_of_one_machine_read_one_clock(ranks: Callable[[int], RankPool]) -> None:
    assert set(ranks(2).run(identity)) == {clock_identity()}


def identity(rank: int) -> str:
    return clock_identity()
