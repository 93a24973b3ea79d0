from __future__ import annotations

from minddp.xray.device_clock import interpolate


def test_what_has_no_stamp_lies_between_its_neighbours() -> None:
    hour = 3_600 * 10**9  # a machine that has been up for long: nanoseconds must not be lost in floats
    host = [hour + t for t in (0, 10, 20, 30, 40)]
    device = [hour + 100, None, None, hour + 400, hour + 401]
    assert interpolate(host, device) == [hour + t for t in (100, 200, 300, 400, 401)]


def test_before_the_first_and_after_the_last_stamp_their_times_count() -> None:
    assert interpolate([0, 10, 20], [None, 50, None]) == [50, 50, 50]


def test_without_any_stamp_the_host_knows_best() -> None:
    assert interpolate([1, 2], [None, None]) == [1, 2]
