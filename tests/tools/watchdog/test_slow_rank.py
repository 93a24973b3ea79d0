"""What one rank measures, and what rank 0 makes of the notes of all, without any other rank or clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch

from minddp.tools.watchdog import slow_rank
from minddp.tools.watchdog.check import EVERY, Finding
from minddp.tools.watchdog.slow_rank import MOST_KEPT, WARM_UP_STEPS, LateRank, SlowRank

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


def accumulate(check: SlowRank) -> None:
    forward(check, synchronises=False)


def backward(check: SlowRank, step: int = 1) -> None:
    check.first_gradient(step)
    check.before_unpack()
    check.post_backward()


def optimize(check: SlowRank, depth: int = 1) -> None:
    """At a greater `depth` it calls its superclass."""
    check.before_step(OPTIMIZER)
    if depth > 1:
        optimize(check, depth - 1)
    check.after_step(OPTIMIZER)


def fail(check: SlowRank) -> None:
    """An exception ends a backward, and the next forward drops it."""
    forward(check)
    check.pre_forward()
    check.post_backward()


@pytest.mark.parametrize(
    ("acts", "noted_ms"),
    [
        (
            # 1: between, 2: buffers, 4: forward, 8: backward, 16: waits, 32: between, 64: optimizer, 128: between,
            # 256: buffers, 512: forward, 1024: backward, 2048: waits
            [forward, backward, optimize, forward, backward],
            [[1, 4, 8, 0, 0, 2 + 16], [32 + 128, 512, 1024, 64, 0, 256 + 2048]],
        ),
        ([accumulate, forward, backward], [[1, 4 + 32, 64, 0, 8, 2 + 16 + 128]]),  # 8: backward and data
        ([forward, forward, backward], [[1 + 8, 4 + 32, 64, 0, 0, 2 + 16 + 128]]),  # 8: evaluates
        ([partial(optimize, depth=2), forward, backward], [[1 + 8 + 16, 64, 128, 2 + 4, 0, 32 + 256]]),
        ([fail], []),
        ([fail, forward, backward], [[32, 128, 256, 0, 0, 64 + 512]]),
    ],
)
def test_a_step_is_divided_among_the_phases_and_waiting(
    check: SlowRank, acts: list[Callable[[SlowRank], None]], noted_ms: list[list[int]]
) -> None:
    """Between, forward, backward, optimizer, accumulation, waited."""
    for act in acts:
        act(check)
    assert [[ns / MS for ns in times] for _, times in check.take_notes()] == noted_ms
    assert check.take_notes() == []


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
