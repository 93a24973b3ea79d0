"""The host does not wait for the device within a step: else nothing would overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import minddp
from tests.gpu.ranks import DEVICE, REHEARSAL, GpuPool

STEP = "the step that is looked at"
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()) for _ in range(10)]
    return nn.Sequential(*blocks).to(DEVICE)


def one_step(options: dict[str, Any]) -> Callable[[], None]:
    keeps = options.get("keeps", False)
    chosen = {name: value for name, value in options.items() if name != "keeps"}
    ddp = minddp.DistributedDataParallel(model(), bucket_cap_mb=0.1, **chosen)
    kept: list[torch.Tensor | None] = []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, foreach=True)
    x = torch.randn(32, 128, device=DEVICE)

    def step() -> None:
        kept[:] = [param.grad for param in ddp.parameters()] if keeps else []
        optimizer.zero_grad(set_to_none=True)
        ddp(x).square().mean().backward()
        optimizer.step()

    for _ in range(5):  # buckets are rebuilt, communicators connected, kernels loaded
        step()
    return step


def step_under_guard(rank: int, options: dict[str, Any]) -> str:
    """A step in which every wait that torch can detect is an error."""
    step = one_step(options)
    if REHEARSAL:
        step()
        return "rehearsed"
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no wait"


def calls_in_a_step(rank: int, options: dict[str, Any]) -> dict[str, int]:
    """How often each function of the CUDA runtime was called between a step's beginning and its end."""
    step = one_step(options)
    if not REHEARSAL:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU] + ([] if REHEARSAL else [ProfilerActivity.CUDA])
    with profile(activities=activities) as profiled:
        step()  # the first in a profile may wait for the profiler itself
        with record_function(STEP):
            step()
    events = profiled.events()
    [span] = [event.time_range for event in events if event.name == STEP and event.device_type.name == "CPU"]
    inside = [
        event for event in events if span.start <= event.time_range.start and event.time_range.end <= span.end
    ]
    calls: dict[str, int] = {}
    for event in inside:
        if event.name.startswith("cuda") or event.name.startswith("cu"):
            calls[event.name] = calls.get(event.name, 0) + 1
    return calls


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "gradients kept": {"keeps": True},  # buckets take new memory in every step then
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("transport", ["process_group", "nccl"])
@pytest.mark.parametrize("world", ["nccl1", "nccl2"])
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_no_wait_that_torch_knows_of(
    world: str, transport: str, options: str, gpu_ranks: Callable[[str], GpuPool]
) -> None:
    chosen = OPTIONS[options] | ({} if REHEARSAL else {"transport": transport})
    gpu_ranks(world).run(step_under_guard, chosen, timeout_s=60)


@pytest.mark.parametrize("transport", ["process_group", "nccl"])
@pytest.mark.parametrize("options", ["default", "views"])
def test_no_wait_in_a_profile(transport: str, options: str, gpu_ranks: Callable[[str], GpuPool]) -> None:
    chosen = OPTIONS[options] | ({} if REHEARSAL else {"transport": transport})
    for calls in gpu_ranks("nccl2").run(calls_in_a_step, chosen, timeout_s=60):
        print(transport, options, dict(sorted(calls.items())))
        assert REHEARSAL or calls.get("cudaLaunchKernel", 0) > 0, f"the profile has seen nothing: {calls}"
        assert not {name: count for name, count in calls.items() if name in WAITS}
