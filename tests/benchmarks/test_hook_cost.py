"""The cost of a parameter: end to end on one rank, and its arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import hook_cost
from benchmarks.hook_cost import Config, Separate
from tests.ranks import RankPool


def test_one_rank_end_to_end_in_every_mode(ranks: Callable[[int], RankPool]):
    config = Config(parameters=(10, 50), size="smoke")
    [report] = ranks(1).run(hook_cost.time_counts, config)
    assert list(report["counts"]) == ["10", "50"]
    for count, result in report["counts"].items():
        assert list(result["contestants"]) == [
            f"{side} {mode}"
            for mode in ("default", "views", "find_unused", "static")
            for side in ("torch", "minddp")
        ]
        for contestant in result["contestants"].values():
            added = contestant["added_us"]
            assert added["low"] <= added["median"] <= added["high"]
            added_ms = contestant["median_ms"] - result["no_wrapper_ms"]
            # Two rounds: the median of differences is the difference of medians.
            assert added["median"] == pytest.approx(added_ms / int(count) * 1e3)
    small, large = hook_cost.tables(report)
    assert [small.title.split()[0], large.title.split()[0]] == ["10", "50"]
    assert len(small.rows) == 8


def test_every_parameter_gets_a_gradient_of_ones():
    model = Separate(count=3, elements=4)
    model().backward()
    assert [p.grad.tolist() for p in model.parameters() if p.grad is not None] == [[1.0] * 4] * 3


def test_a_turn_gets_through_many_parameters():
    assert [hook_cost.separate(count, 4).steps_per_turn for count in (100, 10_000, 10**6)] == [200, 2, 2]


@pytest.mark.parametrize("wrong", ["elements", "rounds", "warmup_rounds", "steps_per_turn"])
def test_a_configuration_that_times_nothing_is_refused(wrong: str):
    with pytest.raises(ValueError, match=wrong):
        Config(**{wrong: 0})


@pytest.mark.parametrize("parameters", [(), (100, 0)])
def test_there_must_be_parameters(parameters: tuple[int, ...]):
    with pytest.raises(ValueError, match="parameters"):
        Config(parameters=parameters)
