"""The harness's order, pairing and statistics, without ranks and without reading a clock's value."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from benchmarks.harness import (
    Rounds,
    Timed,
    Turn,
    bootstrap_interval,
    compare,
    estimate,
    gathered,
    in_ms,
    median_ms,
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


def test_the_order_depends_on_the_seed_alone():
    assert schedule(PAIRS, 9, seed=5) == schedule(PAIRS, 9, seed=5)
    assert schedule(PAIRS, 9, seed=5) != schedule(PAIRS, 9, seed=6)


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
    clock = {"wall": 0.0, "cpu": 0.0}

    def step() -> None:
        clock["wall"] += 3.0
        clock["cpu"] += 1.0

    monkeypatch.setattr("benchmarks.harness.time.perf_counter", lambda: clock["wall"])
    monkeypatch.setattr("benchmarks.harness.time.process_time", lambda: clock["cpu"])
    turns = race({"x": step}, [["x"]], steps_per_turn=4, barrier=lambda: None)
    assert turns == {"x": [Turn(seconds=3.0, cpu_seconds=1.0)]}


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


def test_the_slowest_rank_counts_for_wall_time_and_the_mean_for_cpu_time():
    first = {"x": [Turn(1.0, 0.5), Turn(5.0, 1.0)]}
    second = {"x": [Turn(2.0, 1.5), Turn(4.0, 3.0)]}
    wall, cpu = over_ranks([first, second])
    assert wall["x"].tolist() == [2.0, 5.0]
    assert cpu["x"].tolist() == [1.0, 2.0]


def _doubled(rank: int) -> list[int]:
    return gathered(2 * rank)


def test_every_rank_gets_the_values_of_all_ranks(ranks: Callable[[int], RankPool]):
    assert ranks(2).run(_doubled) == [[0, 2], [0, 2]]


def test_short_rounds_are_repeated_to_fill_the_time():
    rounds = Rounds(least=26, warmup=2, seed=0, seconds=60)
    assert rounds.timed(round_s=5.0) == 26, "long ones are not cut short"
    assert rounds.timed(round_s=60 / 26) == 26
    assert rounds.timed(round_s=0.5) == 5 * 26
    assert Rounds(least=26, warmup=2, seed=0).timed(round_s=1e-6) == 26, "unless there is no such time"


def test_a_race_has_only_the_rounds_that_fit_into_its_limit_but_enough_for_an_interval():
    rounds = Rounds(least=16, warmup=2, seed=0, limit_s=10)
    assert rounds.timed(round_s=0.5) == 16
    assert rounds.timed(round_s=2.0) == 5
    assert rounds.timed(round_s=60.0) == 2


def _race_of_two(rank: int) -> tuple[Timed, list[int], list[str]]:
    totals: list[int] = []
    log: list[str] = []

    def bar(total: int) -> Callable[[], object]:
        totals.append(total)
        return lambda: log.append(".")

    contestants = {"a": lambda: log.append("a"), "b": lambda: log.append("b")}
    rounds = Rounds(least=4, warmup=3, seed=0)
    return timed_race(contestants, [["a"], ["b"]], rounds, 1, bar), totals, log


def test_a_timed_race_counts_what_follows_the_warm_up(ranks: Callable[[int], RankPool]):
    (first, totals, log), (second, *_) = ranks(2).run(_race_of_two)
    for name in "ab":
        assert len(first.wall[name]) == 4
        assert first.wall[name].tolist() == second.wall[name].tolist(), "the slowest rank's, on every rank"
    assert totals == [4]
    assert log.count("a") == log.count("b") == 2 * (3 + 4)
    assert "." not in log[: 3 * 4], "the warm-up has no bar"
    assert log.count(".") == 4


def _unequal_race(rank: int) -> int:
    """A round takes 3 s on the first rank, by its clock, and 6 s on the second."""
    with mock.patch("benchmarks.harness.time.perf_counter", side_effect=itertools.count(step=1 + rank)):
        rounds = Rounds(least=1, warmup=1, seed=0, seconds=60)
        return len(timed_race({"x": lambda: None}, [["x"]], rounds, 1).wall["x"])


def test_all_ranks_run_as_many_rounds_as_the_slowest_has_time_for(ranks: Callable[[int], RankPool]):
    assert ranks(2).run(_unequal_race) == [10, 10]


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    # Round 2 was ten times slower for both, and round 3 for one of them: neither moves the figure.
    baseline = np.array([1.0, 10.0, 1.0, 1.0, 1.0])
    seconds = np.array([2.0, 20.0, 20.0, 1.9, 2.1])
    ratio = compare(seconds, baseline, seed=0)
    assert ratio.median == 2.0
    assert ratio.spread == pytest.approx(2.1 - 2.0)
    assert ratio.rounds == 5
    assert ratio.low <= ratio.median <= ratio.high


def test_an_estimate_is_a_median_with_an_interval_around_it():
    found = estimate(np.array([1.0, 2.0, 3.0, 4.0, 100.0]), seed=0)
    assert (found.median, found.spread, found.rounds) == (3.0, 2.0, 5)
    assert 1.0 <= found.low < 3.0 < found.high <= 100.0


def test_unpaired_or_missing_rounds_are_refused():
    with pytest.raises(ValueError, match="2 and 3"):
        compare(np.ones(2), np.ones(3), seed=0)
    with pytest.raises(ValueError, match="at least one"):
        compare(np.ones(0), np.ones(0), seed=0)


def test_the_bootstrap_is_deterministic_by_seed():
    samples = np.random.default_rng(0).normal(1.0, 0.1, 30)
    assert bootstrap_interval(samples, seed=1) == bootstrap_interval(samples, seed=1)
    few = [bootstrap_interval(samples, seed, resamples=50) for seed in range(5)]
    assert len(set(few)) > 1, "another seed draws other samples"


def test_the_bootstrap_interval_of_equal_samples_is_a_point():
    assert bootstrap_interval(np.full(9, 1.25), seed=0) == (1.25, 1.25)


def test_the_bootstrap_interval_contains_the_true_median_about_95_times_in_100():
    rng = np.random.default_rng(7)
    intervals = [bootstrap_interval(rng.normal(1.0, 0.1, 30), seed=i, resamples=500) for i in range(200)]
    covered = sum(low <= 1.0 <= high for low, high in intervals)
    assert 175 <= covered <= 199


def test_median_ms():
    assert median_ms(np.array([0.001, 0.002, 0.1])) == pytest.approx(2.0)
    assert in_ms({"x": np.array([0.00123456, 2.0])}) == {"x": [1.2346, 2000.0]}
