"""The x-ray on a GPU: times are the device's, and in the order in which the device did things."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import minddp
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.recording import Recording
from tests.gpu.ranks import DEVICE, REHEARSAL, GpuPool


def recorded(rank: int, options: dict[str, str]) -> Recording:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(DEVICE)
    ddp = minddp.DistributedDataParallel(model, bucket_cap_mb=8, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    x = torch.randn(256, 1024, device=DEVICE)

    def train(steps: int) -> None:
        for _ in range(steps):
            ddp(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(5)
    with minddp.xray(ddp, title="on a GPU", limit_s=20) as x_ray:
        train(3)
    return x_ray.recording


@pytest.mark.parametrize("transport", ["process_group", "nccl"])
@pytest.mark.parametrize("world", ["nccl1", "nccl2", "gloo2"])
def test_times_are_the_devices(world: str, transport: str, gpu_ranks: Callable[[str], GpuPool]) -> None:
    recording = gpu_ranks(world).run(recorded, {} if REHEARSAL else {"transport": transport}, timeout_s=100)[0]
    if not REHEARSAL:
        assert recording.ranks[0].device == torch.cuda.get_device_name()
    steps = steps_of(recording)
    assert len(steps) == 3
    for step in steps:
        for rank in step.ranks:
            assert rank.length_ns > 0
            for bucket in rank.buckets:
                print(bucket)
                assert bucket.completion_was_seen
                assert bucket.launched_ns <= bucket.completed_ns
                if not REHEARSAL and world != "gloo2":  # gloo's callback comes a moment after the wait is over
                    assert bucket.completed_ns <= bucket.waited_ns
