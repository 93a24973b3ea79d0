"""Modules that lie on several devices of one type: allowed, with buckets for each device.

No test here needs such devices: what is planned is computed from tensors without memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from minddp.core.plan import BucketPlan, ParamSpec, plan_from_readiness, plan_from_registration
from minddp.options import BucketCaps
from minddp.replicas import broadcast as replicas
from minddp.replicas.placement import Placement

# (device, elements) of parameters in registration order; float32
SPREAD = [("cuda:0", 300), ("cuda:1", 500), ("cuda:0", 200), ("cuda:1", 100), ("cuda:1", 900), ("cuda:0", 50)]


class Spread(nn.Module):
    def __init__(self, places: list[tuple[str, int]]):
        super().__init__()
        for index, (device, numel) in enumerate(places):
            self.register_parameter(f"p{index}", nn.Parameter(torch.empty(numel, device=device)))


@pytest.fixture
def spread() -> Iterator[Spread]:
    with FakeTensorMode():
        yield Spread(SPREAD)


def specs(module: nn.Module) -> list[ParamSpec]:
    named = module.named_parameters()
    return [ParamSpec(name, param.numel(), param.dtype, param.device) for name, param in named]


def members(plan: BucketPlan) -> list[list[int]]:
    return [[slot.param for slot in bucket.slots] for bucket in plan.buckets]


# ------------------------------------------------------------------ checks


def test_several_devices_of_one_type_are_allowed(spread: Spread) -> None:
    """The device that counts for small messages is that of the first parameter, as in torch."""
    placement = Placement.checked(spread, (), None, None)
    assert placement == Placement(torch.device("cuda:0"), None, None)
    inputs, kwargs = (torch.ones(1),), {"mask": None}
    assert placement.move(inputs, kwargs) == (inputs, kwargs), "the module itself moves things between its devices"


# ------------------------------------------------------------------ plans


@pytest.mark.parametrize("caps", [(1000,), (1 << 40,), (1,), (800, 2000)])
def test_buckets_are_torchs(spread: Spread, caps: tuple[int, ...]) -> None:
    params = list(spread.parameters())
    theirs, _ = dist._compute_bucket_assignment_by_size(params, list(caps), [False] * len(params))
    assert members(plan_from_registration(specs(spread), caps)) == list(reversed(theirs))


@pytest.mark.parametrize("caps", [(1000,), (1 << 40,), (800, 2000)])
def test_no_bucket_spans_devices(spread: Spread, caps: tuple[int, ...]) -> None:
    for plan in (
        plan_from_registration(specs(spread), caps),
        plan_from_readiness(specs(spread), [5, 4, 3, 2, 1, 0], caps),
    ):
        for bucket in plan.buckets:
            assert {plan.params[slot.param].device for slot in bucket.slots} == {bucket.device}
        assert sorted(param for params in members(plan) for param in params) == list(range(len(SPREAD)))


def test_each_device_has_a_small_first_bucket(spread: Spread) -> None:
    """And buckets are launched in the order in which they fill, on any device."""
    caps = BucketCaps(first_bytes=900, rest_bytes=4000)
    plan = plan_from_readiness(specs(spread), [5, 4, 3, 2, 1, 0], caps.after_rebuild())
    assert members(plan) == [[4], [5, 2], [3, 1], [0]]
    assert [bucket.cap_bytes for bucket in plan.buckets] == [900, 900, 4000, 4000]
    assert "cuda:1" in str(plan)


def test_a_broadcast_sends_the_devices_apart(spread: Spread) -> None:
    chunks = list(replicas._chunks(list(spread.parameters()), replicas.COALESCE_BYTES))
    assert [[tensor.numel() for tensor in chunk] for chunk in chunks] == [[300, 200, 50], [500, 100, 900]]
