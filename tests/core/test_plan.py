"""The bucket plan against torch's own assignment, and the properties that any plan must have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from minddp.core.plan import BucketPlan, ParamSpec, plan_from_readiness, plan_from_registration

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
DEVICES = (CPU, torch.device("meta"))

specs_lists = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(DTYPES), st.sampled_from(DEVICES)), min_size=1, max_size=20
).map(lambda rows: [ParamSpec(f"p{i}", *row) for i, row in enumerate(rows)])
caps_lists = st.lists(st.integers(0, 400) | st.just(1 << 40), min_size=1, max_size=4)


def param_lists(plan: BucketPlan) -> list[list[int]]:
    return [[slot.param for slot in bucket.slots] for bucket in plan.buckets]


def torch_assignment(
    specs: Sequence[ParamSpec], caps: Sequence[int], order: Sequence[int] = ()
) -> tuple[list[list[int]], list[int]]:
    """Torch's buckets and their capacities; `order[k]` is the parameter that tensor k belongs to."""
    by_place = [specs[param] for param in order] if order else specs
    tensors = [torch.empty(spec.numel, dtype=spec.dtype, device=spec.device) for spec in by_place]
    return dist._compute_bucket_assignment_by_size(tensors, list(caps), [], list(order))


def specs_of(*numels: int, dtype: torch.dtype = torch.float32) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", numel, dtype, CPU) for i, numel in enumerate(numels)]


@settings(max_examples=200, deadline=None)
@given(specs_lists, caps_lists)
def test_registration_plan_is_torchs_assignment_reversed(specs: list[ParamSpec], caps: list[int]) -> None:
    plan = plan_from_registration(specs, caps)
    groups, limits = torch_assignment(specs, caps)
    assert param_lists(plan) == groups[::-1]
    assert [bucket.cap_bytes for bucket in plan.buckets] == limits[::-1]


@settings(max_examples=200, deadline=None)
@given(specs_lists, caps_lists, st.randoms(use_true_random=False))
def test_readiness_plan_has_torchs_buckets(specs: list[ParamSpec], caps: list[int], random) -> None:
    """The same buckets with the same inner order. Torch does not define the order of half-full ones."""
    order = random.sample(range(len(specs)), len(specs))
    plan = plan_from_readiness(specs, order, caps)
    groups, _ = torch_assignment(specs, caps, order)
    assert sorted(param_lists(plan)) == sorted(groups)


@settings(max_examples=100, deadline=None)
@given(specs_lists, caps_lists, st.randoms(use_true_random=False))
def test_a_bucket_never_waits_for_a_later_one(specs: list[ParamSpec], caps: list[int], random) -> None:
    """Buckets are launched in the order in which they fill when gradients become ready as observed."""
    order = random.sample(range(len(specs)), len(specs))
    plan = plan_from_readiness(specs, order, caps)
    filled_at = [max(order.index(slot.param) for slot in bucket.slots) for bucket in plan.buckets]
    assert filled_at == sorted(filled_at)


@settings(max_examples=100, deadline=None)
@given(specs_lists, caps_lists, st.booleans(), st.randoms(use_true_random=False))
def test_every_plan_is_sound(specs: list[ParamSpec], caps: list[int], small_last: bool, random) -> None:
    order = random.sample(range(len(specs)), len(specs))
    for plan in (
        plan_from_registration(specs, caps),
        plan_from_readiness(specs, order, caps, small_last_bucket=small_last),
    ):
        assert sorted(itertools.chain(*param_lists(plan))) == list(range(len(specs))), "each parameter once"
        assert plan.nbytes == sum(spec.nbytes for spec in specs)
        for index, bucket in enumerate(plan.buckets):
            assert bucket.index == index
            end = 0
            for slot in bucket.slots:
                spec = specs[slot.param]
                assert (spec.dtype, spec.device) == (bucket.dtype, bucket.device)
                assert (slot.bucket, slot.offset, slot.numel) == (index, end, spec.numel)
                assert plan.slot_of[slot.param] is slot
                end += slot.numel
            assert bucket.numel == end
            assert bucket.nbytes == end * bucket.dtype.itemsize


def test_small_last_bucket_counts_capacities_from_the_end() -> None:
    plan = plan_from_readiness(specs_of(1, 1, 1, 1, 1), range(5), [4, 8], small_last_bucket=True)
    assert param_lists(plan) == [[1, 0], [3, 2], [4]]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 2], []])
def test_an_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="each of 3 parameters once"):
        plan_from_readiness(specs_of(1, 1, 1), order, [8])


def test_a_plan_prints_every_parameter_with_its_place() -> None:
    specs = [ParamSpec("body.weight", 3000, torch.float32, CPU), ParamSpec("head.bias", 7, torch.bfloat16, CPU)]
    text = str(plan_from_registration(specs, [1 << 40]))
    title, _, *rows = text.splitlines()
    assert "2 parameters, 2 buckets, 12,014 bytes" in title
    assert [row.split() for row in rows] == [
        ["0", "head.bias", "bfloat16", "cpu", "0", "7", "14"],
        ["1", "body.weight", "float32", "cpu", "0", "3,000", "12,000"],
    ]


def test_names_follow_the_offsets() -> None:
    plan = plan_from_readiness(specs_of(1, 1, 1), [2, 0, 1], [1 << 40])
    assert plan.names(0) == ["p2", "p0", "p1"]
