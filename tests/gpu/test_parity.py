"""The random search for a difference from torch's DDP (tests/parity), with models and batches on the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, seed, settings

import minddp
from tests.gpu.ranks import DEVICE, WORLDS, GpuPool
from tests.parity import models, runner, steps
from tests.parity.runner import SUBJECT, Diverged, Report, run_scenario
from tests.parity.scenario import Scenario
from tests.parity.strategies import scenarios
from tests.ranks import RankFailure

EXAMPLES = int(os.environ.get("MINDDP_GPU_EXAMPLES", "40"))  # for each world
_NOT_HERE = {"keep_local"}  # makes a future that does not know of a device, which torch refuses


def run_on_gpu(rank: int, scenario: Scenario, transport: str | None) -> Report:
    """As on the CPU, where everything is made; then it moves."""
    make_batch = steps.make_batch

    def moved_batch(*args: object) -> models.Batch:
        batch = make_batch(*args)  # type: ignore[arg-type]
        x = batch.x.detach().to(DEVICE).requires_grad_(batch.x.requires_grad)
        return replace(batch, x=x, tokens=batch.tokens.to(DEVICE))

    def agree(report: Report) -> None:
        ones = torch.ones(3, device=DEVICE)
        dist.all_reduce(ones)
        if ones.tolist() != [float(dist.get_world_size())] * 3:
            raise Diverged(f"ranks are out of step, an all-reduce of ones gave {ones}; the scenario was {report}")

    subject = SUBJECT if transport is None else "tests.gpu.test_parity:OverNccl"
    with (
        mock.patch.object(steps, "make_batch", moved_batch),
        mock.patch.object(steps, "Network", lambda spec: models.Network(spec).to(DEVICE)),
        mock.patch.object(runner, "_check_ranks_still_agree", agree),
    ):
        return run_scenario(rank, scenario, subject)


class OverNccl(minddp.DistributedDataParallel):
    """minddp's wrapper, straight on NCCL."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs, transport="nccl")


def search(pool: GpuPool, transport: str | None = None, examples: int = EXAMPLES) -> None:
    for number in range(examples):
        for scenario in drawn(number, pool.world_size):
            play(scenario, pool, transport)


def drawn(number: int, world_size: int) -> list[Scenario]:
    """The examples of one seed: few, and no shrinking, since a card's time is short."""
    found: list[Scenario] = []

    @seed(number)
    @settings(max_examples=2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(scenarios((world_size,)))
    def collect(scenario: Scenario) -> None:
        found.append(scenario)

    collect()
    return [scenario for scenario in dict.fromkeys(found) if scenario.hook not in _NOT_HERE]


def play(scenario: Scenario, pool: GpuPool, transport: str | None) -> None:
    try:
        reports = pool.run(run_on_gpu, scenario, transport, timeout_s=60)
    except RankFailure as failure:
        pytest.fail(f"{failure}\nin {scenario!r}")
    mismatches = [line for report in reports for line in report.mismatches]
    assert not mismatches, "\n".join([*mismatches, repr(scenario)])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", WORLDS)
def test_minddp_does_as_torch_does_bit_for_bit(world: str, gpu_ranks: Callable[[str], GpuPool]) -> None:
    search(gpu_ranks(world))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", ["nccl1", "nccl2"])
def test_minddp_straight_on_nccl_does_as_torch_does_bit_for_bit(
    world: str, gpu_ranks: Callable[[str], GpuPool], only_on_a_card: None
) -> None:
    search(gpu_ranks(world), transport="nccl", examples=max(1, EXAMPLES // 2))
