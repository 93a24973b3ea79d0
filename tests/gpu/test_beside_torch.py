"""Training on the GPU beside torch's wrapper in the same process group: equal bits after every step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import minddp
from tests.features.beside import Trail, Wrap, play, random, snapshot
from tests.gpu.ranks import DEVICE, REHEARSAL, WORLDS, GpuPool


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolutions(images).mean((2, 3)))


class TwoStreams(nn.Module):
    """Half of the model runs on a stream of its own, so gradients are computed on two."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        self.right = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        self.head = nn.Linear(64, 8)
        self.side = torch.cuda.Stream() if DEVICE == "cuda" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.side is None:
            return self.head(self.left(x) + self.right(x))
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            right = self.right(x)
        left = self.left(x)
        here.wait_stream(self.side)
        right.record_stream(here)
        return self.head(left + right)

    def __deepcopy__(self, memo: dict[int, Any]) -> TwoStreams:
        return self


def train(wrap: Wrap, rank: int, case: dict[str, Any]) -> Trail:
    torch.manual_seed(0)
    model = {"conv": ConvNet, "streams": TwoStreams}[case.get("model", "conv")]().to(DEVICE)
    if case.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    if "dtype" in case:
        model = model.to(case["dtype"])
    ddp = wrap(model, **case.get("options", {}))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2, enabled="autocast" in case)
    shape = (4, 3, 16, 16) if isinstance(model, ConvNet) else (4, 64)
    trail = []
    for step in range(case.get("steps", 6)):
        x = random(*shape, rank=rank, step=step).to(DEVICE).to(case.get("dtype", torch.float32))
        if case.get("channels_last"):
            x = x.to(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=case.get("set_to_none", True))
        with torch.autocast(DEVICE, dtype=case["autocast"]) if "autocast" in case else nullcontext():
            loss = ddp(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        trail.append(snapshot(ddp, loss=loss.detach(), norm=norm))
    return trail


CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "views": {"options": {"gradient_as_bucket_view": True}},
    "views, zeroed": {"options": {"gradient_as_bucket_view": True}, "set_to_none": False},
    "zeroed": {"set_to_none": False},
    "static": {"options": {"static_graph": True}},
    "small buckets": {"options": {"bucket_cap_mb": 0.001}},
    "amp float16": {"autocast": torch.float16},
    "amp bfloat16": {"autocast": torch.bfloat16, "options": {"gradient_as_bucket_view": True}},
    "bfloat16": {"dtype": torch.bfloat16},
    "channels_last": {"channels_last": True},
    "channels_last views amp": {
        "channels_last": True,
        "autocast": torch.bfloat16,
        "options": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    },
    "streams": {"model": "streams", "options": {"bucket_cap_mb": 0.01}, "steps": 30},
    "streams views": {"model": "streams", "options": {"gradient_as_bucket_view": True}, "steps": 30},
}


def places_of_buckets(rank: int, options: dict[str, Any]) -> list[list[int]]:
    """The buckets' addresses in some steps after the rebuild, with gradients released before each."""
    ddp = minddp.DistributedDataParallel(ConvNet().to(DEVICE), bucket_cap_mb=0.001, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    places = []
    for step in range(8):
        optimizer.zero_grad(set_to_none=True)
        ddp(random(4, 3, 16, 16, rank=rank, step=step).to(DEVICE)).square().mean().backward()
        optimizer.step()
        places.append([bucket.flat.data_ptr() for bucket in ddp._reducer.store.all()])
    return places[3:]


@pytest.mark.parametrize("transport", ["process_group", "nccl"])
@pytest.mark.parametrize("world", WORLDS)
def test_buckets_stay_where_they_are(world: str, transport: str, gpu_ranks: Callable[[str], GpuPool]) -> None:
    """A transport that still held a bucket when the next backward begins would look like a script that keeps
    gradients, and the bucket would take new memory in every step. See minddp/core/gradient_aliasing.py."""
    for places in gpu_ranks(world).run(places_of_buckets, {} if REHEARSAL else {"transport": transport}):
        assert len(places[0]) > 1
        assert all(place == places[0] for place in places), places


def read_later(wrap: Wrap, rank: int, width: int) -> Trail:
    """Gradients are copied by another stream, long after the next backward has begun, and released at once: the
    allocator knows of that stream (`record_stream`), as torch requires."""
    torch.manual_seed(0)
    ddp = wrap(nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(DEVICE))
    side = torch.cuda.Stream() if not REHEARSAL else None
    trail = []
    for step in range(6):
        ddp(random(8, width, rank=rank, step=step).to(DEVICE)).square().mean().backward()
        if side is None:
            trail.append(snapshot(ddp))
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(10**8)  # cycles: some fifty milliseconds
                trail.append({name: param.grad.clone() for name, param in ddp.named_parameters()})
            for param in ddp.parameters():
                param.grad.record_stream(side)
        ddp.zero_grad(set_to_none=True)
    if not REHEARSAL:
        torch.cuda.synchronize()
    return trail


@pytest.mark.parametrize("width", [64, 1024])
@pytest.mark.parametrize("world", ["nccl1", "nccl2"])
def test_gradients_may_still_be_read_by_another_stream(
    world: str, width: int, gpu_ranks: Callable[[str], GpuPool]
) -> None:
    gpu_ranks(world).run(play, read_later, width, timeout_s=60)


def beside(rank: int, case: dict[str, Any], ours: dict[str, Any]) -> int:
    return len(play(rank, train, case, ours=ours))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_over_the_process_group(world: str, case: str, gpu_ranks: Callable[[str], GpuPool]) -> None:
    assert set(gpu_ranks(world).run(beside, CASES[case], {}, timeout_s=100)) == {CASES[case].get("steps", 6)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", ["nccl1", "nccl2"])
def test_straight_on_nccl(world: str, case: str, gpu_ranks: Callable[[str], GpuPool]) -> None:
    ours = {} if REHEARSAL else {"transport": "nccl"}
    gpu_ranks(world).run(beside, CASES[case], ours, timeout_s=100)


def test_nccl_beneath_a_group_of_gloo(gpu_ranks: Callable[[str], GpuPool], only_on_a_card: None) -> None:
    """The transport needs the group's store alone. Sums of two ranks have one order: gloo's bits are the same."""
    gpu_ranks("gloo2").run(beside, CASES["float32"], {"transport": "nccl"}, timeout_s=100)
