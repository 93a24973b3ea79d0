"""Every way to use the wrapper, on the simulated device: the CPU's bits, no race, no wait of the host in a step."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from tests.ranks import RankPool
from tests.simulated_device.modes import MODES, Outcome, run_on_cpu, run_on_device

TRANSPORTS = ("process_group", pytest.param("nccl", marks=pytest.mark.slow))
Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def on_cpu(ranks: Ranks) -> Callable[[int, str], list[Outcome]]:
    """The ranks' outcomes of a mode on the plain CPU, which both transports are compared with."""
    return functools.cache(lambda world_size, mode: ranks(world_size).run(run_on_cpu, mode))


def check(outcomes: list[Outcome], name: str) -> None:
    mode = MODES[name]
    found = [error for outcome in outcomes for error in outcome.errors]
    assert [error for error in found if not any(known in error for known in mode.known_errors)] == []
    waits = [wait for outcome in outcomes for wait in outcome.waits]
    assert [wait for wait in waits if not any(known in wait for known in mode.waits)] == []
    assert all(any(known in wait for wait in waits) for known in mode.waits), "documented, but does not wait"
    assert all(any(known in error for error in found) for known in mode.known_errors), "known, but is no more"


def equal_bits(one: list[Outcome], other: list[Outcome]) -> bool:
    bits = [[tensor for outcome in outcomes for tensor in outcome.bits] for outcomes in (one, other)]
    return all(map(torch.equal, *bits))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_race_no_wait_and_the_bits_of_the_cpu(
    world_size: int, name: str, transport: str, ranks: Ranks, on_cpu: Callable[[int, str], list[Outcome]]
) -> None:
    outcomes = ranks(world_size).run(run_on_device, name, transport)
    check(outcomes, name)
    if world_size <= MODES[name].equal_up_to:
        assert equal_bits(outcomes, on_cpu(world_size, name))
