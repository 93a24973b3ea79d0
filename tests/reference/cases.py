"""Modules with all features that a wrapper may handle wrongly. All make a loss of shape [] from [n, 6]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

FEATURES = 6
EXAMPLES_PER_RANK = 4


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def frozen() -> nn.Module:
    module = plain()
    module[0].weight.requires_grad_(False)
    module[2].bias.requires_grad_(False)
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    module[2].weight = module[0].weight
    return module


def batch_norm() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()
    module[1].running_mean.normal_()
    return module


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5).double()
        self.middle = nn.Linear(5, 4)
        self.last = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).float()).tanh().double())


class Transposed(nn.Module):
    """Its weight, and so its gradient, does not lie in memory in the order of its indices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3).double().t())
        self.scale = nn.Parameter(torch.randn(()).double())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) * self.scale


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


CASES: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "frozen": frozen,
    "tied": tied,
    "batch_norm": batch_norm,
    "two_dtypes": TwoDtypes,
    "transposed": Transposed,
}


def build(case: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return CASES[case]()


def shards_for(world_size: int, seed: int = 100) -> list[Tensor]:
    """One shard [n, 6] per rank; every rank knows all of them, so that it can compute the oracle's gradient."""
    generator = torch.Generator().manual_seed(seed)
    shape = (world_size, EXAMPLES_PER_RANK, FEATURES)
    return [*torch.randn(shape, generator=generator, dtype=torch.float64).unbind()]


def loss_of(module: nn.Module, examples: Tensor) -> Tensor:
    return module(examples).square().mean()
