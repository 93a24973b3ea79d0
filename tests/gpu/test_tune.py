"""`bucket_cap_mb="auto"` on a GPU: times are the device's, all ranks have one plan, and later steps do not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import minddp
from minddp.tools.forecast.auto_buckets import OBSERVED_STEPS, WARM_UP_STEPS
from tests.gpu.ranks import DEVICE, REHEARSAL, GpuPool
from tests.parity.compare import difference

STEPS = 2 * (WARM_UP_STEPS + OBSERVED_STEPS) + 4


def tuned(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """The tuning, and the differences of weights from those of a wrapper with fixed buckets."""
    torch.manual_seed(0)
    models = [nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(DEVICE) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = minddp.DistributedDataParallel(models[0], bucket_cap_mb="auto", **options)
    fixed = minddp.DistributedDataParallel(models[1], **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(rank)).to(DEVICE)

    def step() -> None:
        for ddp, optimizer in zip((ours, fixed), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            ddp(x).square().mean().backward()
            optimizer.step()

    for _ in range(STEPS):
        step()
    if not REHEARSAL:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        if not REHEARSAL:
            torch.cuda.set_sync_debug_mode("default")
    tuning = ours.tuning
    assert tuning is not None
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return {
        "words": str(tuning),
        "plan": str(ours.plan),
        "link": (tuning.link.latency_s, tuning.link.bytes_per_s),
        "before_s": tuning.before_s,
        "differs": [found for one, other in pairs if (found := difference(one.detach(), other.detach()))],
    }


@pytest.mark.parametrize("transport", ["process_group", "nccl"])
@pytest.mark.parametrize("world", ["nccl1", "nccl2"])
def test_buckets_are_tuned_by_the_devices_clock(
    world: str, transport: str, gpu_ranks: Callable[[str], GpuPool]
) -> None:
    found = gpu_ranks(world).run(tuned, {} if REHEARSAL else {"transport": transport}, timeout_s=60)
    print(found[0]["words"])
    for rank in found:
        assert rank["differs"] == []
        assert rank["plan"] == found[0]["plan"]
        assert rank["link"] == found[0]["link"]
        assert rank["link"][1] > 0
        assert 0 < rank["before_s"] < 60
