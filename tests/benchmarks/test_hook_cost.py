"""The cost of a parameter: end to end on one rank, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import hook_cost
from benchmarks.hook_cost import Config, Separate, added_us


def test_one_rank_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "cost.json"
    config = Config(
        parameters=50, settings=("default",), rounds=2, warmup_rounds=1, steps_per_turn=1, out=out, timeout_s=90
    )
    hook_cost.main(config)
    report = json.loads(out.read_text())
    assert set(report["median_ms"]) == {"no wrapper", "torch default", "minddp default"}
    assert set(report["us_per_parameter"]) == {"torch default", "minddp default"}
    for cost in report["us_per_parameter"].values():
        assert set(cost) == {"median", "low", "high"}
        assert cost["low"] <= cost["median"] <= cost["high"]
    assert "50 parameters" in capsys.readouterr().out


def test_added_microseconds_are_per_parameter():
    cost = added_us(np.array([0.02, 0.03, 0.04]), Config(parameters=10_000))
    assert cost["median"] == pytest.approx(3.0)


def test_every_parameter_gets_a_gradient_of_ones():
    model = Separate(count=3, elements=4)
    model().backward()
    assert [p.grad.tolist() for p in model.parameters() if p.grad is not None] == [[1.0] * 4] * 3


@pytest.mark.parametrize("wrong", ["parameters", "elements", "rounds", "warmup_rounds", "steps_per_turn"])
def test_a_configuration_that_times_nothing_is_refused(wrong: str):
    with pytest.raises(ValueError, match=wrong):
        Config(**{wrong: 0})
