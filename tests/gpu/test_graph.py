"""A whole step (forward, backward with its all-reduces, optimizer) captured in a CUDA graph, and replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.features.beside import random
from tests.gpu.ranks import GpuPool
from tests.parity.compare import difference

WARM_UP_STEPS = 11  # as many as torch asks for before its own DDP is captured
REPLAYS = 4


def train(rank: int, wrap: Callable[[nn.Module], nn.Module], captured: bool) -> dict[str, torch.Tensor]:
    """The weights after as many steps either way, each on a batch of its own."""
    torch.manual_seed(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a wrapper that is to be captured must not be made on the default stream
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).cuda()
        ddp = wrap(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        x = torch.zeros(16, 64, device="cuda")

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            ddp(x).square().mean().backward()
            optimizer.step()

        for number in range(WARM_UP_STEPS):
            x.copy_(random(16, 64, rank=rank, step=number))
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph, stream=stream):
                step()
        for number in range(REPLAYS):
            x.copy_(random(16, 64, rank=rank, step=100 + number))
            graph.replay() if captured else step()
        torch.cuda.synchronize()
    return {name: param.detach().cpu() for name, param in model.named_parameters()}


def beside(rank: int, options: dict[str, object]) -> dict[str, str | None]:
    expected = train(rank, lambda model: TorchDDP(model, bucket_cap_mb=0.02), captured=False)
    got = train(rank, lambda m: minddp.DistributedDataParallel(m, bucket_cap_mb=0.02, **options), captured=True)
    return {name: found for name in expected if (found := difference(expected[name], got[name]))}


@pytest.mark.parametrize("transport", ["process_group", "nccl"])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("world", ["nccl1", "nccl2"])
def test_a_captured_step_replays_to_torchs_bits(
    world: str, views: bool, transport: str, gpu_ranks: Callable[[str], GpuPool], only_on_a_card: None
) -> None:
    options = {"transport": transport, "gradient_as_bucket_view": views}
    assert not any(gpu_ranks(world).run(beside, options, timeout_s=60))


@pytest.mark.parametrize("transport", ["process_group", "nccl"])
@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_a_step_that_might_have_left_parameters_unused_but_does_not(
    transport: str, gpu_ranks: Callable[[str], GpuPool], only_on_a_card: None
) -> None:
    """See core/usage_map.py."""
    options = {"transport": transport, "find_unused_parameters": True}
    assert not any(gpu_ranks("nccl1").run(beside, options, timeout_s=60))
