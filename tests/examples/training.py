"""A small training, in every test the same: by torch's class, by minddp's, or with something put in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

STEPS = 4
CAP_MB = 0.001  # several buckets
State = dict[str, torch.Tensor]


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(
        nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU()), nn.Linear(40, 40), nn.Linear(40, 3)
    )
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 4)
    return module


def train(rank: int, ddp: nn.Module, batch_size: int = 5) -> State:
    """Each rank's data is its own; returns the trained state."""
    generator = torch.Generator().manual_seed(1 + rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(batch_size, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in ddp.state_dict().items()}


def torch_trained(rank: int, prepare: Callable[[nn.Module], object] = lambda _: None) -> State:
    ddp = TorchDDP(network(), bucket_cap_mb=CAP_MB)
    prepare(ddp)
    return train(rank, ddp)


def differing(one: State, other: State) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value.view(-1), other[name].view(-1))]
