"""Each change holds off its optimisation and no other, and a wrapper with it trains to the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import parts
from benchmarks.parts import AGAIN, AS_IT_COMES, CHANGES, OPTIMISATIONS, Config
from minddp import DistributedDataParallel
from minddp.core import gradient_aliasing, packing
from minddp.tools.watchdog.finite import FiniteGradients
from minddp.transport import spin_wait
from tests.ranks import RankPool, on_ranks


def _constants() -> dict[str, Any]:
    return {
        "without acceleration": os.environ.get("MINDDP_ACCELERATION"),
        "without gradient aliasing": gradient_aliasing.SMALLEST_BYTES,
        "without spin wait": spin_wait.SPIN_LIMIT_S,
        "without packing groups": packing.LARGE_BYTES,
    }


@pytest.mark.parametrize("change", [AS_IT_COMES, *OPTIMISATIONS])
def test_a_change_covers_the_build_and_nothing_else(change: str):
    before, built = _constants(), nn.Identity()
    seen: dict[str, Any] = {}

    def build() -> Any:
        seen.update(_constants())
        return built

    assert CHANGES[change](build) is built
    assert _constants() == before
    assert {name for name in before if seen[name] != before[name]} == ({change} - {AS_IT_COMES})


@on_ranks(2)
@pytest.mark.parametrize(("change", "aliases"), [(AS_IT_COMES, True), ("without gradient aliasing", False)])
def test_without_gradient_aliasing_gradients_have_memory_of_their_own(
    rank: int, change: str, aliases: bool
) -> None:
    torch.manual_seed(0)

    def build() -> DistributedDataParallel:
        ddp = DistributedDataParallel(nn.Linear(256, 256), transport="process_group")
        for _ in range(parts.FIRST_STEPS):
            step(ddp)
        return ddp

    def step(ddp: nn.Module) -> None:
        ddp.zero_grad(set_to_none=True)
        ddp(torch.ones(2, 256)).sum().backward()

    ddp = CHANGES[change](build)
    step(ddp)
    grad = next(ddp.parameters()).grad
    assert grad is not None
    assert (grad.untyped_storage().nbytes() > grad.nbytes) == aliases


@on_ranks(2)
def test_the_guard_check_finite_and_the_recorder_are_there_where_they_should_be(rank: int) -> None:
    expected = {
        AS_IT_COMES: (True, False, False),
        AGAIN: (True, False, False),
        "without the guard": (False, False, False),
        "with check_finite": (True, True, False),
        "recorded by x-ray": (True, False, True),
    }
    found = {}
    for name in CHANGES.keys() - OPTIMISATIONS.keys():
        ddp = CHANGES[name](lambda **options: DistributedDataParallel(nn.Linear(2, 2), **options))
        checks_finite = any(isinstance(extension, FiniteGradients) for extension in ddp.extensions)
        found[name] = (ddp.guard is not None, checks_finite, ddp.events.sink is not None)
        parts.recordings.close()
    assert found == expected


def test_two_ranks_end_to_end(ranks: Callable[[int], RankPool]):
    config = Config(workloads=("short",), size="smoke")
    report, _ = ranks(2).run(parts.time_workloads, config)
    transports = report["workloads"]["short"]["transports"]
    assert list(transports) == ["process_group", "shared_memory"]
    for by_change in transports.values():
        assert list(by_change) == list(CHANGES)
        assert by_change[AS_IT_COMES]["ratio"]["median"] == 1.0
        assert all(of["same_bits"] for of in by_change.values())
    assert len(list(parts.tables(report))) == 2
