"""The guard where parameters are on a device: fingerprints are computed there, and read when they have arrived."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import minddp
from minddp.tools.watchdog.fingerprint import Reading
from tests.gpu.ranks import DEVICE, GpuPool

FAULTY = 1


def findings(rank: int, lr_of_faulty: float) -> list[str]:
    """What this rank's guard has found after some steps, one of which takes a while."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20))).to(DEVICE)
    ddp = minddp.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr_of_faulty if rank == FAULTY else 0.1)
    for step in range(25):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert ddp.guard is not None
    ddp.guard.close()
    return [finding.text for finding in ddp.guard.findings]


def test_calm_training_on_a_device_is_no_finding(gpu_ranks: Callable[[str], GpuPool]) -> None:
    assert gpu_ranks("nccl2").run(findings, 0.1)[0] == []


def test_drift_on_a_device_is_found(gpu_ranks: Callable[[str], GpuPool]) -> None:
    (text,) = gpu_ranks("nccl2").run(findings, 0.2)[0]
    assert "`lr of group 0` is 0.1 on rank 0, but 0.2 on rank 1" in text
    assert "equal in step 0, different in step 1" in text


def test_fingerprints_are_those_of_the_cpu() -> None:
    pieces = {"long": torch.randn(1000), "short": torch.randn(7)}
    on_device = Reading((name, piece.to(DEVICE)) for name, piece in pieces.items())
    assert on_device.prints() == Reading(pieces.items()).prints()
