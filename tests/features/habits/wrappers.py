"""Habits with several wrappers, with parts that change on the way, with exceptions and nested backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.features.beside import Steps, Wrap, random, snapshot
from tests.features.habits.model import STEPS, layers, trained


def wraps_within(wrap: Wrap, rank: int) -> Steps:
    module = layers()
    module[0] = wrap(module[0])
    yield from trained(wrap(module), rank)


def wraps_parts(wrap: Wrap, rank: int) -> Steps:
    module = layers()
    for index in (0, 2, 4):
        module[index] = wrap(module[index])
    yield from trained(module, rank)


def turns_channels_last(wrap: Wrap, rank: int, turn: int) -> Steps:
    """Before step `turn`, so that gradients have other strides than in the step before."""
    ddp = wrap(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 16, 3, padding=1)))
    for step in range(STEPS):
        ddp.zero_grad()
        if step == turn:
            ddp.to(memory_format=torch.channels_last)
        layout = torch.channels_last if step >= turn else torch.contiguous_format
        ddp(random(2, 64, 4, 4, rank=rank, step=step).to(memory_format=layout)).square().sum().backward()
        yield snapshot(ddp)


class Blown(Exception):
    """Of a `Fuse`."""


class Fuse(torch.autograd.Function):
    """The identity. Its backward raises while it is `lit`."""

    lit = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        if Fuse.lit:
            raise Blown
        return grads[0]


class Fused(nn.Sequential):
    """Layers, with a fuse after the first and its activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self):
            x = layer(x if index != 2 else Fuse.apply(x))
        return x
