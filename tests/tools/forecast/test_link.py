"""A link fitted to times of messages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp.tools.forecast.link import Link, fit_link

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
