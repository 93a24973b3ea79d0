from __future__ import annotations

from dataclasses import replace

from minddp.forecast.link import Link
from minddp.xray.plans import alternatives, ready_order
from minddp.xray.reading import steps_of
from tests.xray.made_up import MIB, MS, Rank, Wire, layout, recording

WIRE = Wire(latency_ns=MS // 2, bytes_per_ms=MIB / 4)
LINK = Link(0.5e-3, MIB / 4 * 1e3)
(STEP,) = steps_of(recording([Rank(), Rank(late_ms=2)], layout([[1] * 6, [1] * 6]), wire=WIRE))


def test_the_recorded_plan_comes_first_and_no_partition_twice() -> None:
    plans = alternatives(STEP, LINK)
    assert plans[0].title == "as recorded"
    assert plans[0].prediction.layout == STEP.layout
    partitions = [tuple(frozenset(b.params) for b in plan.prediction.layout.buckets) for plan in plans]
    assert len(set(partitions)) == len(partitions)


def test_from_one_bucket_to_one_per_parameter() -> None:
    counts = {plan.title: len(plan.prediction.layout.buckets) for plan in alternatives(STEP, LINK)}
    assert counts["one bucket"] == 1
    assert counts["a bucket per parameter"] == 12
    assert counts["buckets of 4 MiB"] == 3


def test_the_computed_plan_is_predicted_to_be_the_quickest() -> None:
    plans = alternatives(STEP, LINK)
    assert plans[-1].code == 'bucket_cap_mb="auto"'
    assert plans[-1].prediction.length_ns == min(plan.prediction.length_ns for plan in plans)
    assert plans[-1].prediction.length_ns < plans[0].prediction.length_ns


def test_arguments_are_written_as_in_python() -> None:
    codes = {plan.title: plan.code for plan in alternatives(STEP, LINK)}
    assert codes["buckets of 4 MiB"] == "bucket_cap_mb=4"
    assert codes["default: 1 MiB, then 25 MiB"] == ""


def test_gradients_that_never_came_are_last_in_order() -> None:
    rank = STEP.ranks[0]
    partial = {param: t for param, t in rank.ready_ns.items() if param != 3}
    step = replace(STEP, ranks=(replace(rank, ready_ns=partial), STEP.ranks[1]))
    assert ready_order(step) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 3]
    assert alternatives(step, LINK)
