"""Calls, and waits for keys of a store, that would not end by themselves."""

from __future__ import annotations

import threading

import pytest

from minddp.platform.time_limits import call_with_limit


def test_a_call_returns_or_raises_what_it_does_without_a_limit() -> None:
    def times_out() -> None:
        raise TimeoutError("its own")

    assert call_with_limit(lambda: 7, 5.0) == 7
    with pytest.raises(ZeroDivisionError):
        call_with_limit(lambda: 1 // 0, 5.0)
    with pytest.raises(TimeoutError, match="its own"):
        call_with_limit(times_out, 5.0)


def test_a_call_that_does_not_return_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"timed out after 0.3 s"):
        call_with_limit(never.wait, 0.3)
    never.set()
