"""Modules small enough for a test, each with something that the surface has to show."""

from __future__ import annotations

import torch
from torch import nn

A_BYTE = 1e-6  # a capacity in MiB that gives each parameter a bucket of its own; torch 2.11 refuses 0


class TwoLayers(nn.Module):
    """The second layer is used only if requested."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        return self.second(self.first(x)) if both else self.first(x)


class Normed(nn.Module):
    """Has buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    """Another one on each rank and in each step."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))
