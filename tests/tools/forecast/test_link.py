"""A link fitted to times of messages, and the cost of an all-reduce on any number of ranks and hosts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp.tools.forecast.link import Link, all_reduce, fit_link, hop_of

SIZES = (4096, 65536, 2**20, 2**24)
LINK = Link(latency_s=2e-4, bytes_per_s=3e9)


@pytest.mark.parametrize("link", [LINK, Link(0.0, 3e9)])
def test_a_link_is_found_from_its_messages(link: Link) -> None:
    found = fit_link({nbytes: link.seconds(nbytes) for nbytes in SIZES})
    assert (found.latency_s, found.bytes_per_s) == pytest.approx(
        (link.latency_s, link.bytes_per_s), rel=1e-6, abs=1e-9
    )


def test_a_message_that_is_off_does_not_decide_alone() -> None:
    """As on a busy machine: the largest message takes five times too long. The small ones still set the latency."""
    times = {nbytes: LINK.seconds(nbytes) for nbytes in SIZES}
    times[SIZES[-1]] *= 5
    found = fit_link(times)
    assert 1e-4 < found.latency_s < 3e-4
    assert 3e9 / 5 < found.bytes_per_s < 3e9


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 10), min_size=2, max_size=len(SIZES)))
def test_whatever_was_measured_a_link_is_positive(seconds: list[float]) -> None:
    found = fit_link(dict(zip(SIZES, seconds, strict=False)))
    assert found.latency_s >= 0
    assert 0 < found.bytes_per_s < float("inf")


# ---------------------------------------------------------------------- round a ring of ranks

INSIDE, BETWEEN = Link(5e-6, 8e9), Link(50e-6, 1e9)
NBYTES = 64e6


def seconds(ranks: int, hosts: int, between: Link = BETWEEN) -> float:
    return all_reduce(ranks, hosts, INSIDE, between).seconds(NBYTES)


@pytest.mark.parametrize("n", [2, 3, 8, 512])
def test_a_ring_sends_twice_all_but_one_nth(n: int):
    """As many hops cross as there are hosts: of 8 ranks on 2 hosts two of eight, and the slower wire decides."""
    share = 2 * (n - 1) / n
    assert seconds(n, 1) == pytest.approx(2 * (n - 1) * 5e-6 + share * NBYTES / 8e9)
    assert seconds(n, n) == pytest.approx(2 * (n - 1) * 50e-6 + share * NBYTES / 1e9)
    assert seconds(8, 2) == pytest.approx(14 * (6 * 5e-6 + 2 * 50e-6) / 8 + 1.75 * NBYTES / 1e9)


def test_one_rank_sends_nothing():
    assert all_reduce(1, 1, INSIDE, BETWEEN) == Link(0.0, math.inf)


@given(host=st.integers(1, 9), hosts=st.integers(1, 9), more=st.integers(1, 9))
def test_more_hosts_or_a_slower_wire_never_help(host: int, hosts: int, more: int):
    few, many = (seconds(host * n, n) for n in (hosts, hosts + more))
    assert few <= many * (1 + 1e-9)
    assert few <= seconds(host * hosts, hosts, Link(50e-6, 1e8)) * (1 + 1e-9)


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (2, 2), (8, 2), (12, 4)])
def test_a_hop_is_found_again_from_an_all_reduce(ranks: int, hosts: int):
    hop = hop_of(all_reduce(ranks, hosts, INSIDE, INSIDE), ranks)
    assert (hop.latency_s, hop.bytes_per_s) == pytest.approx((5e-6, 8e9))


def test_one_rank_shows_no_hop_and_ranks_are_divided_equally():
    with pytest.raises(ValueError, match="measure two ranks"):
        hop_of(INSIDE, 1)
    with pytest.raises(ValueError, match="6 ranks cannot be divided equally among 4 hosts"):
        all_reduce(6, 4, INSIDE, BETWEEN)
