"""The model of all lessons: five layers with ten parameters, small enough for its bucket plan to fit a screen."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

WIDTH = 512  # a square weight of float32 is 1 MiB, a bias 2 KiB
EXAMPLES_PER_RANK = 256
CAP_MIB = 1.0  # of a bucket: one weight, and the small gradients before it
FOLLOWED = "layer2.weight"  # the parameter whose gradient the pages follow


def small_net() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        layer1=nn.Linear(WIDTH, WIDTH),
        layer2=nn.Linear(WIDTH, WIDTH),
        layer3=nn.Linear(WIDTH, WIDTH),
        norm=nn.LayerNorm(WIDTH),
        head=nn.Linear(WIDTH, WIDTH),
    )
    return nn.Sequential(layers)


def examples_of(rank: int) -> Tensor:
    """This rank's part of the batch: [EXAMPLES_PER_RANK, WIDTH]."""
    return torch.randn(EXAMPLES_PER_RANK, WIDTH, generator=torch.Generator().manual_seed(rank))


def loss_of(module: nn.Module, examples: Tensor) -> Tensor:
    """A mean over the examples: []."""
    return (module(examples) - examples).square().mean()
