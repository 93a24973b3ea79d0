"""The harness's order, pairing and statistics, without ranks and without reading a clock's value."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.harness import (
    Rounds,
    Times,
    compare,
    estimate,
    over_ranks,
    race,
    schedule,
    timed_race,
)
from tests.ranks import RankPool

PAIRS = [["a", "A"], ["b", "B"], ["c", "C"]]


def test_each_contestant_of_a_heat_comes_first_equally_often_and_heats_change_places():
    heats = [["floor"], ["a", "A"], ["b", "B", "bB"]]
    order = schedule(heats, rounds=12, seed=3)
    initials = [heat[0][0] for heat in heats]
    firsts = Counter(next(name for name in names if name.lower()[0] == i) for names in order for i in initials)
    assert firsts == {"floor": 12, "a": 6, "A": 6, "b": 4, "B": 4, "bB": 4}
    assert {names[0][0].lower() for names in order} == {"f", "a", "b"}


@pytest.mark.parametrize("rounds", [1, 4, 7])
def test_every_round_has_every_contestant_once_and_pairs_side_by_side(rounds: int):
    order = schedule(PAIRS, rounds, seed=1)
    assert len(order) == rounds
    for names in order:
        assert sorted(names) == sorted("aAbBcC")
        assert all(names[i].lower() == names[i + 1].lower() for i in (0, 2, 4))


def test_a_turn_is_a_barrier_an_untimed_step_and_the_timed_steps():
    log: list[str] = []
    contestants = {"x": lambda: log.append("x"), "y": lambda: log.append("y")}
    turns = race(
        contestants,
        [["x", "y"], ["y", "x"]],
        steps_per_turn=2,
        barrier=lambda: log.append("|"),
        on_round=lambda: log.append("."),
    )
    assert "".join(log) == "|xxx|yyy.|yyy|xxx."
    assert {name: len(of_name) for name, of_name in turns.items()} == {"x": 2, "y": 2}


def test_a_turn_is_settled_before_the_clock_is_read_and_left_afterwards():
    log: list[str] = []
    race(
        {"x": lambda: log.append("x")},
        [["x"], ["x"]],
        steps_per_turn=2,
        barrier=lambda: log.append("|"),
        settle=lambda: log.append("s"),
        leave=log.append,
    )
    assert "".join(log) == "|xsxxsx" * 2, "the last x is the name that was left"


def test_time_per_step_is_the_turn_divided_by_its_timed_steps(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]

    def step() -> None:
        clock[0] += 3.0

    monkeypatch.setattr("benchmarks.harness.time.perf_counter", lambda: clock[0])
    turns = race({"x": step}, [["x"]], steps_per_turn=4, barrier=lambda: None)
    assert turns == {"x": [3.0]}


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_off_in_a_turn_and_as_before_afterwards(enabled: bool):
    seen: list[bool] = []
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        race({"x": lambda: seen.append(gc.isenabled())}, [["x"]], 1, barrier=lambda: None)
        with pytest.raises(RuntimeError, match="boom"):
            race({"x": _raise}, [["x"]], 1, barrier=lambda: None)
        assert seen == [False, False]
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable() if before else gc.disable()


def _raise() -> None:
    raise RuntimeError("boom")


def test_the_slowest_rank_counts():
    assert over_ranks([{"x": [1.0, 5.0]}, {"x": [2.0, 4.0]}])["x"].tolist() == [2.0, 5.0]


def _race_of_two(rank: int) -> tuple[Times, list[int], list[str]]:
    totals: list[int] = []
    log: list[str] = []

    def bar(total: int) -> Callable[[], object]:
        totals.append(total)
        return lambda: log.append(".")

    contestants = {"a": lambda: log.append("a"), "b": lambda: log.append("b")}
    rounds = Rounds(timed=4, warmup=3, seed=0)
    return timed_race(contestants, [["a"], ["b"]], rounds, 1, bar), totals, log


def test_a_timed_race_counts_what_follows_the_warm_up(ranks: Callable[[int], RankPool]):
    (first, totals, log), (second, *_) = ranks(2).run(_race_of_two)
    for name in "ab":
        assert len(first[name]) == 4
        assert first[name].tolist() == second[name].tolist(), "the slowest rank's, on every rank"
    assert totals == [4]
    assert log.count("a") == log.count("b") == 2 * (3 + 4)
    assert "." not in log[: 3 * 4], "the warm-up has no bar"
    assert log.count(".") == 4


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    # Round 2 was ten times slower for both, and round 3 for one of them: neither moves the figure.
    baseline = np.array([1.0, 10.0, 1.0, 1.0, 1.0])
    seconds = np.array([2.0, 20.0, 20.0, 1.9, 2.1])
    ratio = compare(seconds, baseline, seed=0)
    assert ratio.median == 2.0
    assert ratio.rounds == 5
    assert ratio.low <= ratio.median <= ratio.high


def test_unpaired_or_missing_rounds_are_refused():
    with pytest.raises(ValueError, match="2 and 3"):
        compare(np.ones(2), np.ones(3), seed=0)
    with pytest.raises(ValueError, match="at least one"):
        compare(np.ones(0), np.ones(0), seed=0)


def test_the_bootstrap_interval_contains_the_true_median_about_95_times_in_100():
    rng = np.random.default_rng(7)
    estimates = [estimate(rng.normal(1.0, 0.1, 30), seed=i) for i in range(200)]
    covered = sum(each.low <= 1.0 <= each.high for each in estimates)
    assert 175 <= covered <= 199
