"""The plan with the least exposed communication, against all plans there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.tools.forecast.link import Link
from minddp.tools.forecast.planner import plan_buckets
from minddp.tools.forecast.step_model import predicted_s
from tests.tools.forecast.made_up import simulated

CPU = torch.device("cpu")

_shares = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)
_links = st.builds(Link, st.floats(0, 2e-3), st.floats(1e5, 1e8), _shares)
_tails = st.just(0.0) | st.floats(0, 10e-3)  # how long backward computes after the last gradient


def gradients(*nbytes: int) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", size // 4, torch.float32, CPU) for i, size in enumerate(nbytes)]


def all_plans(specs: list[ParamSpec]) -> list[BucketPlan]:
    """Every way to divide gradients, in their order, into buckets."""
    plans = []
    for is_end in itertools.product([False, True], repeat=len(specs) - 1):
        ends = [0, *(place for place, flag in enumerate(is_end, 1) if flag), len(specs)]
        plans.append(plan_from_groups(specs, [range(*pair) for pair in itertools.pairwise(ends)], "by hand"))
    return plans


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 5e-3), min_size=1, max_size=6).map(sorted), _links, _tails)
def test_the_closed_form_gives_the_end_of_the_simulation(ready_s: list[float], link: Link, tail_s: float) -> None:
    computed_s = ready_s[-1] + tail_s
    for plan in all_plans(gradients(*range(400, 400 + 400 * len(ready_s), 400))):
        expected = simulated(plan, ready_s, link, computed_s).end_s
        assert predicted_s(plan, link, ready_s, computed_s) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(_links, _tails, st.integers(1, 9))
def test_hardly_any_other_plan_ends_earlier(link: Link, tail_s: float, num_gradients: int) -> None:
    """Whatever share the messages take from backward."""
    specs = gradients(*[4000] * num_gradients)
    ready_s = [1e-3 * (turn + 1) for turn in range(num_gradients)]
    computed_s = ready_s[-1] + tail_s
    best_s = min(predicted_s(plan, link, ready_s, computed_s) for plan in all_plans(specs))
    found = plan_buckets(specs, ready_s, link, computed_s)
    assert predicted_s(found, link, ready_s, computed_s) <= 1.1 * best_s


def test_each_kind_has_its_buckets_and_they_leave_as_they_are_ready() -> None:
    specs = [
        ParamSpec("a", 1000, torch.float32, CPU),
        ParamSpec("b", 1000, torch.bfloat16, CPU),
        ParamSpec("c", 1000, torch.float32, CPU),
        ParamSpec("d", 10, torch.float32, CPU, sparse=True),
    ]
    plan = plan_buckets(specs, [3e-3, 2e-3, 1e-3, 0.0], Link(1.0, 1e6))
    assert [plan.names(bucket.index) for bucket in plan.buckets] == [["d"], ["b"], ["c", "a"]]
