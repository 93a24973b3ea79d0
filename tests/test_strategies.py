"""Which options give which strategies, and that what only accelerates changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minddp.core.gradient_aliasing import GradientAliasing
from minddp.core.reducer import Reducer
from minddp.core.usage_tracker import UsageTracker
from minddp.modes.rpc import RpcGradients
from minddp.platform.acceleration_switch import VARIABLE
from minddp.strategies import make_reducer
from tests.fakes import FakeDDP, FakeTransport, options


def reducer_of(module: nn.Module | None = None, *, sparse: tuple[str, ...] = (), **changed: Any) -> Reducer:
    named = list((module or nn.Linear(2, 2)).named_parameters())
    return make_reducer(options(**changed), named, sparse, FakeTransport(), lambda: 2.0)


def modes_of(reducer: Reducer) -> list[type]:
    return [type(mode) for mode in reducer.modes]


@pytest.mark.parametrize("other", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_without_parameters_nothing_is_expected(other: dict[str, bool]) -> None:
    """All parameters are delayed."""
    assert type(reducer_of(nn.Identity(), **other).usage_tracker) is UsageTracker


@pytest.mark.parametrize(
    ("changed", "aliases"),
    [
        ({}, True),
        ({"static_graph": True}, True),
        ({"static_graph": True, "find_unused_parameters": True}, True),
        ({"find_unused_parameters": True}, False),
        ({"gradient_as_bucket_view": True}, False),
    ],
)
def test_where_gradients_may_alias_the_bucket(changed: dict[str, bool], aliases: bool) -> None:
    reducer = reducer_of(**changed)
    assert modes_of(reducer) == [RpcGradients, GradientAliasing][: 1 + aliases]
    assert (reducer.store.all()[0].aliasing is not None) == aliases
    assert reducer.store.all()[0].grads_are_views == changed.get("gradient_as_bucket_view", False)


@pytest.mark.parametrize(
    ("changed", "before", "after"),
    [
        ({"bucket_cap_mb": 0}, 1, 3),
        ({"bucket_cap_mb_list": [0]}, 3, 3),
        ({"find_unused_parameters": True, "bucket_cap_mb": 0}, 3, 3),
        ({"static_graph": True, "bucket_cap_mb": 0}, 1, 3),
    ],
)
def test_capacities_before_and_after_the_rebuild(changed: dict[str, Any], before: int, after: int) -> None:
    reducer = reducer_of(nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(3)]), **changed)
    assert len(reducer.store.all()) == before
    reducer.store.observe([0, 1, 2])
    reducer.rebuild_if_due()
    assert len(reducer.store.all()) == after


# ------------------------------------------------------------------ MINDDP_ACCELERATION


def three_steps(**changed: Any) -> tuple[FakeDDP, list[torch.Tensor]]:
    torch.manual_seed(0)
    ddp = FakeDDP(nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)), FakeTransport(3), **changed)
    optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        ddp.step(torch.randn(4, 128))
        optimizer.step()
    return ddp, [param.detach().clone() for param in ddp.module.parameters()]


@pytest.mark.parametrize(
    "changed",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["default", "views", "find unused", "static"],
)
def test_switched_off_buckets_do_not_alias_and_bits_are_the_same(
    changed: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, accelerated = three_steps(**changed)
    monkeypatch.setenv(VARIABLE, "off")
    plain, values = three_steps(**changed)
    assert modes_of(plain.reducer) == [RpcGradients]
    assert all(bucket.aliasing is None for bucket in plain.reducer.store.all())
    assert all(map(torch.equal, accelerated, values))
