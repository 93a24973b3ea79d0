"""Waiting from outside."""

from __future__ import annotations

import threading

import pytest

from minddp.doctor.patience import Abandoned, TimeUp, patiently


def test_what_is_returned_and_raised_comes_through() -> None:
    assert patiently(lambda: 7, 5.0) == 7
    with pytest.raises(ZeroDivisionError):
        patiently(lambda: 1 // 0, 5.0)


def test_a_time_limit_of_the_callee_is_not_taken_for_ours() -> None:
    def gives_up() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        patiently(gives_up, 5.0)


def test_what_never_returns_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(TimeUp, match=r"no end within 0.3 s"):
        patiently(never.wait, 0.3)
    with pytest.raises(Abandoned):
        patiently(never.wait, 60.0, useless=lambda: True)
    never.set()
