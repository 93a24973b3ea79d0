"""What one rank measures, and what rank 0 makes of the notes of all, without any other rank or clock."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch

from minddp.tools.forecast.lateness import LateRank
from minddp.tools.watchdog import slow_rank
from minddp.tools.watchdog.check import EVERY, Finding
from minddp.tools.watchdog.slow_rank import MOST_KEPT, WARM_UP_STEPS, SlowRank

MS = 1_000_000
OPTIMIZER = cast(torch.optim.Optimizer, None)


class Clock:
    """A clock that goes on by 1 ms, 2 ms, 4 ms ... from reading to reading, so that each sum is unique."""

    def __init__(self) -> None:
        self.now_ms, self.tick_ms = 0, 1

    def __call__(self) -> int:
        self.now_ms, self.tick_ms = self.now_ms + self.tick_ms, 2 * self.tick_ms
        return self.now_ms * MS


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> SlowRank:
    """A check whose next interval takes 1 ms, the one after it 2 ms, and so on."""
    clock = Clock()
    monkeypatch.setattr(slow_rank, "perf_counter_ns", clock)
    check = SlowRank()
    clock.tick_ms = 1
    return check


def forward(check: SlowRank, synchronises: bool = True) -> None:
    check.pre_forward()
    check.before_module(1, (), {})
    check.post_forward(synchronises)


def backward(check: SlowRank, step: int = 1) -> None:
    check.first_gradient(step)
    check.before_unpack()
    check.post_backward()


def optimizer(check: SlowRank) -> None:
    check.before_step(OPTIMIZER)
    check.after_step(OPTIMIZER)


def noted_ms(check: SlowRank) -> list[list[float]]:
    """Step, and milliseconds: between, forward, backward, optimizer, accumulation, waited."""
    return [[step, *(ns / MS for ns in times)] for step, times in check.take_notes()]


# ---------------------------------------------------------------------- what a rank measures


def test_a_step_is_divided_among_the_phases_and_waiting(check: SlowRank) -> None:
    forward(check)  # 1: between, 2: buffers, 4: forward
    backward(check)  # 8: backward, 16: waits
    optimizer(check)  # 32: between, 64: optimizer
    forward(check)  # 128: between, 256: buffers, 512: forward
    backward(check, 2)
    first, second = noted_ms(check)
    assert first == [1, 1, 4, 8, 0, 0, 2 + 16]
    assert second == [2, 32 + 128, 512, 1024, 64, 0, 256 + 2048]
    assert check.take_notes() == []


def test_what_follows_a_forward_that_is_not_synchronised_is_accumulation(check: SlowRank) -> None:
    forward(check, synchronises=False)  # 1, 2, 4
    forward(check)  # 8: backward and data, 16, 32
    backward(check)  # 64, 128
    assert noted_ms(check) == [[1, 1, 4 + 32, 64, 0, 8, 2 + 16 + 128]]


def test_a_forward_without_backward_counts_as_between(check: SlowRank) -> None:
    forward(check)  # 1, 2, 4
    forward(check)  # 8: evaluates, 16, 32
    backward(check)  # 64, 128
    assert noted_ms(check) == [[1, 1 + 8, 4 + 32, 64, 0, 0, 2 + 16 + 128]]


def test_an_optimizer_that_calls_its_superclass_is_one(check: SlowRank) -> None:
    check.before_step(OPTIMIZER)  # 1: between
    optimizer(check)  # 2, 4: optimizer
    check.after_step(OPTIMIZER)  # 8
    forward(check)
    backward(check)
    assert noted_ms(check)[0][4] == 2 + 4


def test_a_backward_that_an_exception_ends_is_no_step(check: SlowRank) -> None:
    forward(check)
    check.pre_forward()
    check.post_backward()  # the next forward drops it
    check.before_module(2, (), {})
    assert check.take_notes() == []
    check.post_forward(True)
    backward(check, 2)
    assert [step for step, *_ in noted_ms(check)] == [2]


# ---------------------------------------------------------------------- what rank 0 makes of it


def times(*, waited_ms: float = 10, **longer_ms: float) -> list[float]:
    """Those of a rank that is busy for 1 ms in each phase, or longer."""
    busy = [1 + longer_ms.get(phase, 0) for phase in ("between", "forward", "backward", "optimizer")]
    return [MS * ms for ms in [*busy, 0, waited_ms]]


LATE: dict[str, Any] = {"forward": 8, "waited_ms": 2}


@pytest.fixture
def windows_of_ten_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_rank, "WINDOW_STEPS", 10)
    monkeypatch.setattr(slow_rank, "WINDOW_S", 0.0)


def compared(check: SlowRank, first: int, num: int, how: dict[str, Any]) -> list[Finding]:
    """What is found in `num` steps, in which rank 1 has been late so."""
    return [one for step in range(first, first + num) for one in check.compare(step, [times(), times(**how)])]


@pytest.mark.usefixtures("windows_of_ten_steps")
def test_a_late_rank_is_found_at_the_end_of_each_window() -> None:
    check = SlowRank()
    assert compared(check, 0, WARM_UP_STEPS + 9, LATE) == []
    (finding,) = compared(check, WARM_UP_STEPS + 9, 1, LATE)
    assert finding.ranks == (1,)
    assert finding.step == WARM_UP_STEPS + 9
    assert finding.text.startswith("Rank 1 is late: 8.0 ms in each step, 8.0 ms of it in forward. The others wait")
    assert f" Measured in steps {WARM_UP_STEPS} to {finding.step}. " in finding.text
    assert compared(check, 20, 10, {}) == []
    (finding,) = compared(check, 30, 10, LATE)
    assert f" Measured in steps 30 to {finding.step}. " in finding.text


def found_on_a_shared_machine(window_s: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is found in half an hour of an even fleet: each rank has its core for itself, but for bursts of 5 s.

    While it shares its core, it takes twice as long. That is so for a fifth of the time.
    """
    now_s, rng = 100.0, random.Random(0)
    monkeypatch.setattr(slow_rank, "perf_counter_ns", lambda: int(1e9 * now_s))
    monkeypatch.setattr(slow_rank, "WINDOW_S", window_s)
    check = SlowRank()
    until_s, shares = [0.0] * 3, [True] * 3
    found, step = [], WARM_UP_STEPS
    while now_s < 1900:
        for rank in range(3):
            if now_s >= until_s[rank]:
                shares[rank] = not shares[rank]
                until_s[rank] = now_s + rng.expovariate(1 / (5 if shares[rank] else 20))
        busy_ms = [rng.uniform(20, 22) * (2 if shared else 1) for shared in shares]
        noted = [[0, 0, MS * busy, 0, 0, MS * (max(busy_ms) - busy + 1)] for busy in busy_ms]
        now_s += 1e-3 * EVERY * (max(busy_ms) + 1)
        step += EVERY
        found += [finding.subject for finding in check.compare(step, noted)]
    return found


def test_a_rank_that_shares_its_core_for_some_seconds_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_on_a_shared_machine(slow_rank.WINDOW_S, monkeypatch) == []
    assert found_on_a_shared_machine(1.5, monkeypatch) != []


@pytest.mark.usefixtures("windows_of_ten_steps")
def test_a_delay_of_less_than_a_millisecond_is_not_reported() -> None:
    check = SlowRank()
    assert compared(check, 10, 10, {"forward": 0.9, "waited_ms": 9.1}) == []
    (finding,) = compared(check, 20, 10, {"forward": 1.1, "waited_ms": 8.9})
    assert finding.subject == "rank 1 in forward"


def test_a_window_has_some_steps_and_takes_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, seen = 100.0, []
    monkeypatch.setattr(slow_rank, "perf_counter_ns", lambda: int(1e9 * now_s))
    monkeypatch.setattr(slow_rank, "late_ranks", lambda steps: seen.append(len(steps)) or [])
    check = SlowRank()
    compared(check, 10, 22, LATE)
    now_s += 89.9
    compared(check, 32, 1, LATE)
    assert seen == [23], "once, for a hint"
    now_s += 0.2
    compared(check, 33, 1, LATE)
    assert seen == [23, 24]
    compared(check, 34, 1, LATE)
    now_s += 91
    compared(check, 35, 18, LATE)
    assert seen == [23, 24]
    compared(check, 53, 1, LATE)
    assert seen == [23, 24, 20]


def test_a_rank_that_costs_much_is_named_in_the_first_window(monkeypatch: pytest.MonkeyPatch) -> None:
    for share, found in ((0.31, 1), (0.29, 0)):
        now_s, late = 100.0, LateRank(1, 8e6, (0.0, 8e6, 0.0, 0.0, 0.0), share)
        monkeypatch.setattr(slow_rank, "perf_counter_ns", lambda: int(1e9 * now_s))
        monkeypatch.setattr(slow_rank, "late_ranks", lambda steps: [late])
        check = SlowRank()
        compared(check, 10, slow_rank.WINDOW_STEPS, LATE)
        now_s += slow_rank.HINT_S - 0.1
        assert compared(check, 40, 1, LATE) == []
        now_s += 0.2
        assert len(compared(check, 41, 1, LATE)) == found
        now_s += 10
        assert compared(check, 42, 1, LATE) == [], "once"


def test_notes_that_are_not_read_take_no_more_and_more_memory() -> None:
    check = SlowRank()
    for step in range(MOST_KEPT + 5):
        forward(check)
        backward(check, EVERY * step)
    taken = check.take_notes()
    assert [taken[0][0], taken[-1][0], len(taken)] == [5 * EVERY, (MOST_KEPT + 4) * EVERY, MOST_KEPT]
