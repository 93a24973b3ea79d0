"""torch.compile around the wrapper, which breaks the graph at its buckets, and inside it: torch's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.features.beside import Trail, Wrap, play, random, snapshot
from tests.gpu.ranks import DEVICE, REHEARSAL, GpuPool


def train(wrap: Wrap, rank: int, outside: bool) -> Trail:
    torch.manual_seed(0)
    torch._dynamo.reset()
    backend = "aot_eager" if REHEARSAL else "inductor"
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12))).to(DEVICE)
    ddp = wrap(model if outside else torch.compile(model, backend=backend), bucket_cap_mb=1.5)
    run = torch.compile(ddp, backend=backend) if outside else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    trail = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        run(random(16, 256, rank=rank, step=step).to(DEVICE)).square().mean().backward()
        optimizer.step()
        trail.append(snapshot(ddp))
    return trail


@pytest.mark.timeout(300)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("world", ["nccl1", "nccl2"])
def test_compiled_models_train_to_torchs_bits(
    world: str, outside: bool, gpu_ranks: Callable[[str], GpuPool]
) -> None:
    gpu_ranks(world).run(play, train, outside, timeout_s=250)
