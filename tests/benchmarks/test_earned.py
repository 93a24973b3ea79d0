"""Each switch holds off its optimisation and no other, and a wrapper without it trains to the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import earned
from benchmarks.contestants import minddp_over
from benchmarks.earned import ALL, SWITCHES, WORTH, Config
from minddp.acceleration import gradient_aliasing
from minddp.core import packing
from minddp.transport import spin_wait
from tests.ranks import RankPool


def _constants() -> dict[str, Any]:
    return {
        "any of them": os.environ.get("MINDDP_ACCELERATION"),
        "gradient aliasing": gradient_aliasing.SMALLEST_BYTES,
        "spin wait": spin_wait.SPIN_LIMIT_S,
        "packing groups": packing.LARGE_BYTES,
    }


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_covers_the_build_and_nothing_else(switch: str):
    before, built = _constants(), nn.Identity()
    seen: dict[str, Any] = {}

    def build() -> nn.Module:
        seen.update(_constants())
        return built

    assert SWITCHES[switch](build) is built
    assert _constants() == before
    assert {name for name in before if seen[name] != before[name]} == ({switch} - {ALL})


@pytest.mark.parametrize("switch", [name for name in SWITCHES if name != ALL])
def test_a_switch_is_undone_if_the_build_fails(switch: str):
    before = _constants()

    def build() -> nn.Module:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        SWITCHES[switch](build)
    assert _constants() == before


def _shares_memory_with_a_bucket(rank: int, switch: str) -> bool:
    """True if a large gradient lies in its bucket after a step of a wrapper that was built under the switch."""
    torch.manual_seed(0)

    def build() -> nn.Module:
        ddp = minddp_over("process_group")(nn.Linear(256, 256))
        for _ in range(earned.FIRST_STEPS):
            step(ddp)
        return ddp

    def step(ddp: nn.Module) -> None:
        ddp.zero_grad(set_to_none=True)
        ddp(torch.ones(2, 256)).sum().backward()

    ddp = SWITCHES[switch](build)
    step(ddp)
    grad = next(ddp.parameters()).grad
    assert grad is not None
    return grad.untyped_storage().nbytes() > grad.nbytes  # the bucket has room for the bias, too


@pytest.mark.parametrize(("switch", "aliases"), [(ALL, True), ("gradient aliasing", False)])
def test_without_gradient_aliasing_gradients_have_memory_of_their_own(
    ranks: Callable[[int], RankPool], switch: str, aliases: bool
):
    assert ranks(2).run(_shares_memory_with_a_bucket, switch) == [aliases] * 2


def test_two_ranks_end_to_end(ranks: Callable[[int], RankPool]):
    config = Config(workloads=("short",), size="smoke")
    report, _ = ranks(2).run(earned.time_workloads, config)
    transports = report["workloads"]["short"]["transports"]
    assert list(transports) == ["process_group", "shared_memory"]
    for by_switch in transports.values():
        assert list(by_switch) == list(SWITCHES)
        assert by_switch[ALL]["ratio"]["median"] == 1.0
        assert all(of["same_bits"] for of in by_switch.values())
    *per_transport, summary = earned.tables(report)
    assert len(per_transport) == 2
    assert [row[0] for row in summary.rows] == [name for name in SWITCHES if name != ALL]


def test_an_optimisation_earns_its_place_by_its_median_and_its_interval():
    figures = {ALL: 1.0} | dict.fromkeys([name for name in SWITCHES if name != ALL], 1.1)
    ratio = partial(dict, spread=0.0, low=1.0, high=1.0)
    workload = {
        "title": "x",
        "transports": {
            "shared_memory": {
                name: {
                    "median_ms": 1.0,
                    "ratio": ratio(median=median),
                    "cpu_ratio": ratio(median=median),
                    "earns": name == "spin wait",
                    "same_bits": True,
                }
                for name, median in figures.items()
            }
        },
    }
    *_, summary = earned.tables({"worth": WORTH, "workloads": {"short": workload}})
    verdicts = {row[0]: row[1] for row in summary.rows}
    assert verdicts.pop("spin wait") == "short (shared memory)"
    assert set(verdicts.values()) == {"nowhere"}


@pytest.mark.parametrize(
    ("median", "low", "earns"), [(1.05, 1.01, True), (1.05, 0.99, False), (1.02, 1.01, False), (0.9, 0.8, False)]
)
def test_the_verdict(median: float, low: float, earns: bool):
    assert earned.earns(median, low) is earns
