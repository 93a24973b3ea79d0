from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from minddp.core.events import EventKind as K
from minddp.core.plan import BucketPlan
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.recording import Stamped
from minddp.tools.xray.timeline import Activity
from minddp.tools.xray.what_if import WhatIf
from tests.tools.xray.made_up import MIB, MS, Rank, Wire, layout, recording

WIRE = Wire(latency_ns=MS // 2, bytes_per_ms=MIB / 4)
FAST = Wire(latency_ns=0, bytes_per_ms=1e12)
PLAN = layout([[1] * 6, [1] * 6, [0.5]])


def analysis(ranks: Sequence[Rank], plan: BucketPlan = PLAN, *, steps: int = 4, wire: Wire = WIRE) -> Analysis:
    return Analysis(recording(ranks, plan, wire=wire, steps=steps, meet=False))


def found(made: Analysis, part: str) -> WhatIf:
    (change,) = [change for change in made.what_ifs if part in change.title]
    return change


@pytest.mark.parametrize(
    ("late", "phase"),
    [
        (Rank(other_ms=6), "between steps"),
        (Rank(forward_ms=15), "in forward"),
        (Rank(loss_ms=6), "between forward and backward"),
        (Rank(backward_ms=25), "in backward"),
        (Rank(optimizer_ms=7), "in the optimizer"),
    ],
)
@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_late_rank_is_named_with_its_phase_and_what_it_costs(late: Rank, phase: str, others: int) -> None:
    made = analysis([*[Rank(copy_ms=0)] * others, replace(late, copy_ms=0)], wire=FAST)
    change = found(made, "as quick as the others")
    assert change.title == f"rank {others} as quick as the others {phase}"
    assert change.gain_ns == pytest.approx(5 * MS, abs=10_000)
    assert made.advice[0].gain_ns == pytest.approx(change.gain_ns, rel=0.5), "nothing else is much larger"


def test_a_rank_that_is_late_in_all_phases_is_tried_in_each_and_in_all() -> None:
    late = Rank(forward_ms=12, backward_ms=24, other_ms=3)
    made = analysis([Rank(), Rank(), late], wire=FAST)
    gains = {change.title: change.gain_ns / MS for change in made.what_ifs if "as quick" in change.title}
    name = "rank 2 as quick as the others"
    assert gains == pytest.approx(
        {
            f"{name} between steps, in forward and in backward": 8,
            f"{name} in backward": 4,
            f"{name} in forward": 2,
            f"{name} between steps": 2,
        },
        abs=0.01,
    )


def test_no_rank_is_late_where_all_are_equally_slow() -> None:
    made = analysis([Rank(forward_ms=40)] * 3)
    assert not [change for change in made.what_ifs if "as quick" in change.title]


def test_a_slow_wire_is_what_the_last_rank_waits_for() -> None:
    made = analysis([Rank(), Rank(loss_ms=6)])
    step = made.typical
    assert step.last.rank == 1
    assert step.waits_for_last_ns(step.ranks[0]) == pytest.approx(5 * MS, abs=10_000)
    costs_ns = step.last.parts_ns[Activity.EXPOSED]
    gain_ns = found(made, "a wire 10 times as fast").gain_ns
    assert 0.8 * costs_ns < gain_ns < costs_ns
    assert found(made, "half the bytes").gain_ns < gain_ns


def test_what_takes_no_time_gains_what_it_took() -> None:
    made = analysis([Rank(other_ms=4, optimizer_ms=3)] * 2, wire=FAST)
    assert found(made, "data ready").gain_ns == pytest.approx(4 * MS, abs=10_000)
    assert found(made, "an optimizer").gain_ns == pytest.approx(3 * MS, abs=10_000)
    copy = found(made, "no copy back")
    assert copy.gain_ns == pytest.approx(3 * 0.5 * MS, rel=0.05)
    assert copy.code == "DistributedDataParallel(model, gradient_as_bucket_view=True)"


# ---------------------------------------------------------------------- buckets


def test_the_recorded_plan_comes_first_and_no_partition_twice() -> None:
    changes = analysis([Rank()] * 2).what_ifs
    assert changes[0].title == "as recorded"
    assert changes[0].plan is None
    plans = [PLAN, *(change.plan for change in changes if change.plan)]
    partitions = [tuple(frozenset(s.param for s in b.slots) for b in plan.buckets) for plan in plans]
    assert len(set(partitions)) == len(partitions)


def test_from_one_bucket_to_one_per_parameter() -> None:
    changes = analysis([Rank()] * 2).what_ifs
    counts = {change.title: len(change.plan.buckets) for change in changes if change.plan}
    assert counts["one bucket"] == 1
    assert counts["a bucket per parameter"] == 13
    codes = {change.title: change.code for change in changes}
    assert codes["a bucket per parameter"] == "DistributedDataParallel(model, bucket_cap_mb=0)"
    assert codes["default buckets: 1 MiB, then 25 MiB"] == "DistributedDataParallel(model)"


def test_the_computed_plan_is_the_quickest() -> None:
    plans = [change for change in analysis([Rank(copy_ms=0)] * 2).what_ifs if change.plan]
    assert 'bucket_cap_mb="auto"' in plans[0].code


# ---------------------------------------------------------------------- what is tried, and what is said


def test_what_cannot_be_changed_is_not_tried() -> None:
    made = recording([Rank()] * 2, PLAN, steps=2)
    without_plan = Analysis(replace(made, has_plan=False))
    assert not [change for change in without_plan.what_ifs if change.plan or change.code]
    ranks = [
        replace(rank, events=(*rank.events, Stamped(rank.events[-1].t_ns, K.COMM_HOOK_RETURNED, 0)))
        for rank in made.ranks
    ]
    hooked = Analysis(replace(made, ranks=tuple(ranks)))
    assert not [change for change in hooked.what_ifs if "half the bytes" in change.title]
    params = tuple(replace(param, dtype=torch.float16) for param in PLAN.params)
    halved = Analysis(recording([Rank()] * 2, replace(PLAN, params=params)))
    assert not [change for change in halved.what_ifs if "half the bytes" in change.title]


def test_advice_is_what_gains_most_in_order_and_one_plan() -> None:
    made = analysis([Rank(), Rank(loss_ms=6)])
    gains = [change.gain_ns for change in made.advice]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 0.01 * made.what_ifs[0].step_ns
    assert sum(change.plan is not None for change in made.advice) == 1
    small = [change for change in made.what_ifs if change.gain_ns < 0.01 * made.what_ifs[0].step_ns]
    assert small
    assert not set(map(id, small)) & set(map(id, made.advice))


def test_of_many_steps_those_around_the_typical_one_are_played() -> None:
    made = analysis([Rank()], steps=100)
    assert len(made.simulated) == 40
    assert made.typical in made.simulated
