"""Habits with several wrappers, with parts that change on the way, with exceptions and nested backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import minddp
from tests.features.beside import Steps, Wrap, random, snapshot
from tests.features.habits.model import CALM_STEPS, STEPS, WIDTH, layers, loss_of, narrow, trained


def shares_a_weight(wrap: Wrap, rank: int, to_none: bool = True) -> Steps:
    """Between two wrappers: each of them averages it. Where it stays, it lies in the first one's bucket."""
    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    other.weight = one.weight
    first, second = wrap(one), wrap(other)
    for step in range(STEPS):
        first.zero_grad(set_to_none=to_none)
        second.zero_grad(set_to_none=to_none)
        loss_of(lambda x: second(torch.tanh(first(x))), rank, step).backward()
        yield snapshot(first)
        yield snapshot(second)


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


def after_exception(wrap: Wrap, ddp: Any) -> Any:
    """The wrapper to go on with. Torch's is of no use any more, and a new one takes its place. minddp's goes on."""
    if isinstance(ddp, minddp.DistributedDataParallel):
        return ddp
    ddp._remove_autograd_hooks()
    return wrap(ddp.module)


def runs_out_of_inputs(wrap: Wrap, rank: int) -> Steps:
    """One rank before the other, twice."""
    ddp = wrap(narrow())
    for _epoch in range(2):
        with ddp.join():
            for step in range(CALM_STEPS + rank):
                ddp.zero_grad()
                loss_of(ddp, rank, step).backward()
                yield snapshot(ddp)


def raises_in_hooks(wrap: Wrap, rank: int) -> Steps:
    """A hook fails when some gradients have arrived and are not packed; see `after_exception`."""
    ddp = wrap(narrow())
    is_lit = False

    def fail(_param: torch.Tensor) -> None:
        if is_lit:
            raise Blown

    ddp.module[2].bias.register_post_accumulate_grad_hook(fail)
    for step in range(STEPS + 2):
        ddp.zero_grad()
        is_lit = step == CALM_STEPS
        try:
            loss_of(ddp, rank, step).backward()
        except Blown:
            ddp = after_exception(wrap, ddp)
        yield snapshot(ddp)
