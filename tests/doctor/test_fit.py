"""Arithmetic on what was measured."""

from __future__ import annotations

import pytest

from minddp.doctor.fit import CoreTime, Reading, clock_offset, fit_line, share_denied

SIZES = (4096, 65536, 2**20, 2**24)


def test_an_exact_line_is_found() -> None:
    line = fit_line({nbytes: 2e-4 + nbytes / 3e9 for nbytes in SIZES})
    assert line.latency_s == pytest.approx(2e-4)
    assert line.bytes_per_s == pytest.approx(3e9)


def test_a_message_that_is_off_does_not_decide_alone() -> None:
    """As on a busy machine: the largest message takes five times too long. Latency stays what small ones say."""
    times = {nbytes: 2e-4 + nbytes / 3e9 for nbytes in SIZES}
    times[SIZES[-1]] *= 5
    line = fit_line(times)
    assert 1e-4 < line.latency_s < 3e-4
    assert 3e9 / 5 < line.bytes_per_s < 3e9


def test_times_without_any_latency_give_a_positive_one() -> None:
    line = fit_line({nbytes: nbytes / 3e9 for nbytes in SIZES})
    assert 0 <= line.latency_s < 1e-6
    assert line.bytes_per_s == pytest.approx(3e9, rel=1e-3)


def test_equal_times_are_all_latency() -> None:
    assert fit_line(dict.fromkeys(SIZES, 1e-3)).latency_s == pytest.approx(1e-3, rel=1e-3)


def test_clocks_that_read_a_barrier_from_both_sides() -> None:
    """Ours is 5 s ahead. In the first round we come late, in the second they do."""
    theirs = [Reading(0.0, 2.1), Reading(9.9, 10.1)]
    ours = [Reading(7.0, 7.1), Reading(13.0, 15.1)]
    offset = clock_offset(ours, theirs)
    assert offset.seconds == pytest.approx(5.05)
    assert offset.error_s == pytest.approx(0.15)


def test_the_true_offset_is_within_the_error() -> None:
    events = [10.0, 11.0, 12.0]
    ours = [Reading(event - 0.3 + 2.5, event + 0.1 + 2.5) for event in events]
    theirs = [Reading(event - 0.01, event + 0.2) for event in events]
    offset = clock_offset(ours, theirs)
    assert abs(offset.seconds - 2.5) <= offset.error_s


def test_the_share_of_the_time_without_a_core_is_of_that_in_which_one_was_wanted() -> None:
    """Not of all time: a thread that sleeps wants none."""
    assert share_denied(CoreTime(5.0, 1.0), CoreTime(8.0, 2.0)) == pytest.approx(0.25)
    assert share_denied(CoreTime(5.0, 1.0), CoreTime(5.0, 1.0)) == 0
