"""The sweep over bucket sizes: end to end on two ranks, and the baselines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import bucket_size, race
from benchmarks.bucket_size import Config, field_of
from tests.ranks import RankPool


def test_two_ranks_end_to_end(ranks: Callable[[int], RankPool]):
    config = Config(workloads=("transformer",), caps_mib=(0.005, 1), size="smoke")
    report, _ = ranks(2).run(bucket_size.time_workloads, config)
    families = report["workloads"]["transformer"]["families"]
    assert list(families) == ["torch", "minddp", "minddp, shared memory"]
    assert list(families["torch"]) == ["default", "0.005", "1"]
    for name in ("minddp", "minddp, shared memory"):
        assert list(families[name]) == ["default", "0.005", "1", "auto"]
        buckets = {heat: figured["buckets"] for heat, figured in families[name].items()}
        assert buckets["0.005"] > buckets["1"] == buckets["default"] == 1
    assert families["torch"]["1"]["ratio"]["median"] == 1.0
    [steps] = bucket_size.tables(report)
    assert steps.title == "transformer, 1 layers of 16: 0.04 MiB"
    assert "minddp, shared memory at auto: buckets: 1" in steps.caption


def test_a_heat_is_a_capacity_and_torch_has_no_auto():
    field = field_of((0.25, 16.0))
    assert race.heats(field) == [
        ["no wrapper"],
        *([f"{family} at {cap}" for family in bucket_size.FAMILIES] for cap in ("default", "0.25", "16")),
        ["minddp at auto", "minddp, shared memory at auto"],
    ]
    baselines = {c.name: c.baseline for c in field}
    assert baselines["minddp at 16"] == "torch at 16"
    assert baselines["minddp at auto"] == "torch at default"


@pytest.mark.parametrize("wrong", [{"caps_mib": ()}, {"caps_mib": (1.0, 0.0)}])
def test_a_configuration_that_times_nothing_is_refused(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Config(**wrong)
