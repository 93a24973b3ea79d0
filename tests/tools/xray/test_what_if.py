from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from minddp.core.events import EventKind as K
from minddp.core.plan import BucketPlan
from minddp.tools.forecast.link import Link
from minddp.tools.xray.analysis import Analysis, WhatIf
from minddp.tools.xray.recording import Stamped
from minddp.tools.xray.timeline import Activity
from tests.tools.xray.made_up import MS, SLOW, Rank, layout, recording

FAST = Link(0.0, 1e15)
PLAN = layout([[1] * 6, [1] * 6, [0.5]])


def analysis(ranks: Sequence[Rank], plan: BucketPlan = PLAN, *, steps: int = 4, wire: Link = SLOW) -> Analysis:
    return Analysis(recording(ranks, plan, wire=wire, steps=steps, meet=False))


def found(made: Analysis, part: str) -> WhatIf:
    (change,) = [change for change in made.what_ifs if part in change.title]
    return change


@pytest.mark.parametrize(
    "late",
    [Rank(forward_ms=15), Rank(loss_ms=6), Rank(backward_ms=25), Rank(forward_ms=12, backward_ms=23)],
    ids=["in forward", "between forward and backward", "in backward", "in several phases"],
)
@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_late_rank_is_named_with_what_it_costs(late: Rank, others: int) -> None:
    made = analysis([*[Rank(copy_ms=0)] * others, replace(late, copy_ms=0)], wire=FAST)
    change = found(made, "as quick as the others")
    assert change.title == f"rank {others} as quick as the others"
    assert change.gain_ns == pytest.approx(5 * MS, abs=10_000)
    assert made.advice[0] is change, "nothing else is larger"


def test_a_quicker_rank_gains_no_more_than_the_wire_allows() -> None:
    """Rank 1 has 30 ms more of backward, but the messages alone take 40 ms."""
    made = analysis([Rank(copy_ms=0), Rank(copy_ms=0, backward_ms=50)], layout([[1]] * 9), steps=3)
    (truth,) = analysis([Rank(copy_ms=0), Rank(copy_ms=0)], layout([[1]] * 9), steps=1).steps
    gain_ns = found(made, "as quick as the others").gain_ns
    assert gain_ns == pytest.approx(made.typical.length_ns - truth.length_ns, rel=0.1)
    assert gain_ns < 20 * MS


def test_no_rank_is_late_where_all_are_equally_slow() -> None:
    made = analysis([Rank(forward_ms=40)] * 3)
    assert not [change for change in made.advice if "as quick" in change.title]


def test_a_slow_wire_is_what_the_last_rank_waits_for() -> None:
    made = analysis([Rank(), Rank(loss_ms=6)])
    step = made.typical
    assert step.last.rank == 1
    assert step.waits_for_last_ns(step.ranks[0]) == pytest.approx(5 * MS, abs=10_000)
    costs_ns = step.last.parts_ns[Activity.EXPOSED]
    gain_ns = found(made, "a wire 10 times as fast").gain_ns
    assert 0.8 * costs_ns < gain_ns < costs_ns
    assert found(made, "half the bytes").gain_ns < gain_ns


def test_no_copy_back_gains_the_copies() -> None:
    copy = found(analysis([Rank()] * 2, wire=FAST), "no copy back")
    assert copy.gain_ns == pytest.approx(3 * 0.5 * MS, rel=0.05)
    assert copy.code == "DistributedDataParallel(model, gradient_as_bucket_view=True)"


def test_computed_buckets_gain_what_one_bucket_exposes() -> None:
    change = found(analysis([Rank(copy_ms=0)] * 2, layout([[1] * 12])), "computed buckets")
    assert change.gain_ns > 10 * MS
    assert change.code == 'DistributedDataParallel(model, bucket_cap_mb="auto")'


# ---------------------------------------------------------------------- what is tried, and what is said


def test_what_cannot_be_changed_is_not_tried() -> None:
    made = recording([Rank()] * 2, PLAN, steps=2)
    without_plan = Analysis(replace(made, has_plan=False))
    assert not [change for change in without_plan.what_ifs if change.code]
    hook = Stamped(made.ranks[0].events[-1].t_ns, K.COMM_HOOK_RETURNED, 0)
    hooked = replace(made, ranks=tuple(replace(rank, events=(*rank.events, hook)) for rank in made.ranks))
    params = tuple(replace(param, dtype=torch.float16) for param in PLAN.params)
    for of_one_precision in (hooked, recording([Rank()] * 2, replace(PLAN, params=params))):
        titles = [change.title for change in Analysis(of_one_precision).what_ifs]
        assert not any("half the bytes" in title for title in titles)


def test_advice_is_what_gains_most_in_order() -> None:
    made = analysis([Rank(), Rank(loss_ms=6)])
    gains = [change.gain_ns for change in made.advice]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 0.01 * made.typical.length_ns
    small = [change for change in made.what_ifs if change.gain_ns < 0.01 * made.typical.length_ns]
    assert small
    assert not set(map(id, small)) & set(map(id, made.advice))
