"""The cost of an all-reduce: its formula, and its limits for many ranks and for one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.tools.forecast.cluster import Cluster, all_reduce, hop_of
from minddp.tools.forecast.link import Link

INSIDE, BETWEEN = Link(5e-6, 8e9), Link(50e-6, 1e9)
NBYTES = 64e6


def seconds(ranks: int, hosts: int, cores: float | None = None) -> float:
    return all_reduce(Cluster(ranks, hosts, INSIDE, BETWEEN, cores)).seconds(NBYTES)


@pytest.mark.parametrize("n", [2, 3, 8, 512])
def test_a_ring_sends_twice_all_but_one_nth(n: int):
    share = 2 * (n - 1) / n
    assert seconds(n, 1) == pytest.approx(2 * (n - 1) * 5e-6 + share * NBYTES / 8e9)
    assert seconds(n, n) == pytest.approx(2 * (n - 1) * 50e-6 + share * NBYTES / 1e9)


def test_of_a_ring_as_many_hops_cross_as_there_are_hosts():
    """8 ranks on 2 hosts: 14 hops, two of eight cross; the slower wire moves 7/4 of the bytes."""
    assert seconds(8, 2) == pytest.approx(14 * (6 * 5e-6 + 2 * 50e-6) / 8 + 1.75 * NBYTES / 1e9)


def test_one_rank_sends_nothing():
    assert all_reduce(Cluster(1, 1, INSIDE, BETWEEN)) == Link(0.0, math.inf)


@given(host=st.integers(1, 9), hosts=st.integers(1, 9), more=st.integers(1, 9))
def test_more_hosts_or_a_slower_wire_never_help(host: int, hosts: int, more: int):
    few, many = (seconds(host * n, n) for n in (hosts, hosts + more))
    assert few <= many * (1 + 1e-9)
    slow = Cluster(host * hosts, hosts, INSIDE, replace(BETWEEN, bytes_per_s=1e8))
    assert seconds(host * hosts, hosts) <= all_reduce(slow).seconds(NBYTES) * (1 + 1e-9)


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (2, 2), (8, 2), (12, 4)])
def test_a_hop_is_found_again_from_an_all_reduce(ranks: int, hosts: int):
    cluster = Cluster(ranks, hosts, INSIDE, INSIDE, cores=2.0)
    hop = hop_of(all_reduce(cluster), cluster)
    assert (hop.latency_s, hop.bytes_per_s) == pytest.approx((5e-6, 8e9))


def test_one_rank_shows_no_hop():
    with pytest.raises(ValueError, match="measure two ranks"):
        hop_of(INSIDE, Cluster(1, 1, INSIDE, INSIDE))


# ---------------------------------------------------------------------- cores


def test_ranks_that_share_a_core_also_share_it_for_messages_but_not_the_wire():
    assert seconds(8, 1, cores=2) == pytest.approx(14 * 4 * 5e-6 + 1.75 * NBYTES / 2e9)
    at_the_wire = seconds(8, 2, cores=4) - seconds(8, 2)
    assert at_the_wire == pytest.approx(0.0, abs=1e-9)
    assert seconds(8, 2, cores=0.25) > 1.75 * NBYTES / 1e9 + seconds(8, 2) / 4


@pytest.mark.parametrize(
    ("hosts", "cores", "taken"),
    [(1, None, 0.0), (1, 5, 0.0), (1, 4, 1.0), (1, 2, 1.0), (2, 2, 1 / 8), (2, 1, 2 / 8), (2, 3, 0.0)],
)
def test_without_a_spare_core_messages_take_what_they_work(hosts: int, cores: float | None, taken: float):
    """Four ranks; across hosts a byte is on the wire for eight times as long as a core works for it."""
    link = all_reduce(Cluster(4, hosts, INSIDE, BETWEEN, cores))
    assert link.taken == pytest.approx(taken)


def test_a_core_hands_bytes_to_the_wire_no_faster_than_it_moves_them():
    fast = Link(0.0, 100e9)
    with_core = all_reduce(Cluster(2, 2, INSIDE, fast, cores=1))
    assert with_core.bytes_per_s == pytest.approx(8e9)
    assert with_core.taken == pytest.approx(1.0)
    assert all_reduce(Cluster(2, 2, INSIDE, fast)).bytes_per_s == pytest.approx(100e9)


def test_ranks_are_divided_equally():
    with pytest.raises(ValueError, match="6 ranks cannot be divided equally among 4 hosts"):
        Cluster(6, 4, INSIDE, BETWEEN)
