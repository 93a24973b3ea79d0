"""The random search for a difference from torch's DDP (tests/parity), with models and batches on the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from tests.gpu.ranks import DEVICE, REHEARSAL, WORLDS, GpuPool
from tests.parity import side, verdict
from tests.parity.careful import careful_script_from
from tests.parity.changes import surroundings
from tests.parity.script import Line, Script
from tests.parity.verdict import Report, play
from tests.ranks import RankFailure

EXAMPLES = int(os.environ.get("MINDDP_GPU_EXAMPLES", "40"))  # for each world
_NOT_HERE = Line("comm_hook", ("keep_local",))  # makes a future that does not know of a device, which torch refuses


def play_on_gpu(rank: int, script: Script) -> Report:
    """As on the CPU, where everything is made; then it moves."""
    with (
        mock.patch.object(side, "DEVICE", DEVICE),
        mock.patch.object(verdict, "DEVICE", DEVICE),
        mock.patch.object(surroundings, "DEVICE", DEVICE),
    ):
        return play(rank, script)


def search(pool: GpuPool, transport: str, examples: int) -> None:
    """Careful scripts, in which there is no error, since a card's time is short."""
    for seed in range(examples):
        script = replace(careful_script_from(seed), world_size=pool.world_size, transport=transport)
        if _NOT_HERE in script.lines:
            continue
        try:
            reports = pool.run(play_on_gpu, script, timeout_s=60)
        except RankFailure as failure:
            pytest.fail(f"{failure}\nin {script!r}")
        failures = [report.failure for report in reports if report.failure]
        assert not failures, "\n".join([*failures, repr(script)])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", WORLDS)
def test_minddp_does_as_torch_does_bit_for_bit(world: str, gpu_ranks: Callable[[str], GpuPool]) -> None:
    search(gpu_ranks(world), "process_group", EXAMPLES)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", ["nccl1", "nccl2"])
def test_minddp_straight_on_nccl_does_as_torch_does_bit_for_bit(
    world: str, gpu_ranks: Callable[[str], GpuPool]
) -> None:
    search(gpu_ranks(world), "process_group" if REHEARSAL else "nccl", max(1, EXAMPLES // 2))
