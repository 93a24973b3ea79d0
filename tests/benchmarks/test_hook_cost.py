"""The cost of a parameter: end to end on one rank, and its arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import hook_cost, results
from benchmarks.display import console_of
from benchmarks.hook_cost import Config, Separate
from tests.ranks import RankPool


def test_one_rank_end_to_end(ranks: Callable[[int], RankPool], capsys: pytest.CaptureFixture[str]):
    config = Config((10, 50), settings=("default",), rounds=2, warmup_rounds=1, turn_parameters=1)
    [report] = ranks(1).run(hook_cost.time_counts, config)
    assert list(report["counts"]) == ["10", "50"]
    for count, result in report["counts"].items():
        assert list(result["contestants"]) == ["torch default", "minddp default"]
        for contestant in result["contestants"].values():
            added = contestant["added_us"]
            assert added["low"] <= added["median"] <= added["high"]
            added_ms = contestant["median_ms"] - result["no_wrapper_ms"]
            # Two rounds: the median of differences is the difference of medians.
            assert added["median"] == pytest.approx(added_ms / int(count) * 1e3)
    hook_cost.print_report(report, console_of())
    assert "nothing communicated" in capsys.readouterr().out


def test_every_parameter_gets_a_gradient_of_ones():
    model = Separate(count=3, elements=4)
    model().backward()
    assert [p.grad.tolist() for p in model.parameters() if p.grad is not None] == [[1.0] * 4] * 3


def test_where_results_go():
    assert Config().resolved().out == results.DIRECTORY / "hook_cost.json"
    assert Config(control=True).resolved().out == results.DIRECTORY / "hook_cost_control.json"


@pytest.mark.parametrize("wrong", ["elements", "rounds", "warmup_rounds", "turn_parameters"])
def test_a_configuration_that_times_nothing_is_refused(wrong: str):
    with pytest.raises(ValueError, match=wrong):
        Config(**{wrong: 0})


@pytest.mark.parametrize("parameters", [(), (100, 0)])
def test_there_must_be_parameters(parameters: tuple[int, ...]):
    with pytest.raises(ValueError, match="parameters"):
        Config(parameters)
