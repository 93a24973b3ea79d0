"""Habits around backward and `.grad`: several backwards; gradients over several steps, kept or replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tests.features.beside import Steps, Wrap, random, snapshot
from tests.features.habits.model import (
    ALIASES,
    CALM_STEPS,
    STEPS,
    WIDTH,
    descend,
    grads,
    layers,
    loss_of,
    losses,
    narrow,
    numbered,
    read,
    trained,
)


def asks_for_gradients(wrap: Wrap, rank: int, of: str, and_goes_back: bool = True) -> Steps:
    """`autograd.grad` after a forward of the wrapper."""
    ddp = wrap(layers())
    for step in range(STEPS):
        ddp.zero_grad()
        x = random(4, WIDTH, rank=rank, step=step).requires_grad_()
        loss = ddp(x).square().sum()
        asked: Sequence[torch.Tensor] = []
        if step >= CALM_STEPS:
            wanted = [x] if of == "input" else list(ddp.parameters())
            asked = torch.autograd.grad(loss, wanted, retain_graph=True)
        if step < CALM_STEPS or and_goes_back:
            loss.backward()
        yield snapshot(ddp) | numbered(asked)


def penalises_slopes(wrap: Wrap, rank: int) -> Steps:
    """A backward through the gradient of the loss by the input."""
    ddp = wrap(layers())
    for step in range(STEPS):
        ddp.zero_grad()
        x = random(4, WIDTH, rank=rank, step=step).requires_grad_()
        loss = ddp(x).square().sum()
        if step >= CALM_STEPS:
            [slope] = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        loss.backward()
        yield snapshot(ddp)


def goes_back_twice(wrap: Wrap, rank: int) -> Steps:
    """A second backward through a retained graph stays local."""
    ddp = wrap(layers())
    for step, loss in losses(ddp, rank):
        loss.backward(retain_graph=step >= CALM_STEPS)
        yield snapshot(ddp)
        if step >= CALM_STEPS:
            loss.backward()
            yield snapshot(ddp)


def goes_forward_twice(wrap: Wrap, rank: int) -> Steps:
    """Two forwards, then their backwards."""
    ddp = wrap(layers())
    for step, loss in losses(ddp, rank):
        for each in [loss, loss_of(ddp, rank, step + STEPS)]:
            each.backward()
            yield snapshot(ddp)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def goes_back_in_parts(wrap: Wrap, rank: int) -> Steps:
    """One backward for each output. Nothing reaches `.grad` before all gradients have come."""
    ddp = wrap(Heads())
    for step in range(STEPS):
        ddp.zero_grad()
        for output in ddp(random(4, WIDTH, rank=rank, step=step)):
            output.square().sum().backward()
            yield snapshot(ddp)


def uses_a_layer_by_itself(wrap: Wrap, rank: int) -> Steps:
    """A local backward through the layer whose gradients come first; the script keeps these gradients."""
    ddp, kept = wrap(layers()), []
    for step in range(STEPS):
        ddp.zero_grad()
        if step >= CALM_STEPS:
            loss_of(ddp.module[-1], rank, step + STEPS).backward()
            kept.append(ddp.module[-1].weight.grad.detach())
        loss_of(ddp, rank, step).backward()
        yield snapshot(ddp)
    yield numbered(kept)


def zeroes(wrap: Wrap, rank: int, how: str) -> Steps:
    """`set_to_none` in various orders; None is a step without zero_grad."""
    ddp = wrap(layers())
    for step in range(STEPS + 2):
        set_to_none = {
            "in place": False,
            "in place at first": step >= CALM_STEPS,
            "in place later": step < CALM_STEPS,
            "in place by turns": step % 2 == 1,
            "once": True if step == CALM_STEPS else None,
        }[how]
        if set_to_none is not None:
            ddp.zero_grad(set_to_none=set_to_none)
        loss_of(ddp, rank, step).backward()
        yield snapshot(ddp)


def keeps(wrap: Wrap, rank: int, how: str) -> Steps:
    """The gradients of all steps, looked at after the last."""
    ddp, kept = wrap(layers()), []
    for taken in trained(ddp, rank):
        yield taken
        kept += [ALIASES[how](grad) for grad in grads(ddp)]
        descend(ddp)
    yield read(how, kept)


def keeps_in_a_graph(wrap: Wrap, rank: int) -> Steps:
    """A graph needs the gradient for its own backward, which comes after that of the next step."""
    ddp = wrap(layers())
    factor = torch.ones(WIDTH, WIDTH, requires_grad=True)
    product = None
    for _step, loss in losses(ddp, rank):
        loss.backward()
        factor.grad = None
        if product is not None:
            product.backward()
        yield snapshot(ddp) | {"factor": factor.grad}
        product = (ddp.module[0].weight.grad * factor).sum()


def watches_gradients_go(wrap: Wrap, rank: int, small: bool = False) -> Steps:
    """A weak reference to a gradient is dead after zero_grad, also to a small one: nothing else refers to it."""
    ddp = wrap(narrow() if small else layers())
    for _step, loss in losses(ddp, rank):
        loss.backward()
        references = [weakref.ref(grad) for grad in grads(ddp)]
        ddp.zero_grad()
        yield {"gone": torch.tensor([reference() is None for reference in references])}


def accumulates_into_its_own_memory(wrap: Wrap, rank: int) -> Steps:
    """The `.grad` of the only parameter is a view of the script's buffer from before each backward."""
    ddp = wrap(nn.Linear(WIDTH, WIDTH, bias=False))
    flat = torch.zeros(WIDTH * WIDTH)
    for step in range(STEPS):
        flat.zero_()
        ddp.module.weight.grad = flat.view(WIDTH, WIDTH)
        loss_of(ddp, rank, step).backward()
        yield snapshot(ddp, flat=flat)


def put_data(param: Any) -> None:
    param.grad.data = param.grad.data * 0.5


def set_memory(param: Any) -> None:
    param.grad.set_(param.grad.clone())


def replace(param: Any) -> None:
    param.grad = param.grad * 0.5


def detach(param: Any) -> None:
    param.grad = param.grad.detach()


def transpose(param: Any) -> None:
    param.grad.t_()


def unsqueeze(param: Any) -> None:
    param.grad.unsqueeze_(0)


def require_grad(param: Any) -> None:
    param.grad.requires_grad_()


def mark(param: Any) -> None:
    param.grad.mark = True


def handles(wrap: Wrap, rank: int, what: Callable[[Any], None], zeroing: bool = True) -> Steps:
    """After each step, `what` is done to each parameter's gradient."""
    ddp = wrap(layers())
    for step in range(STEPS):
        if zeroing:
            ddp.zero_grad()
        loss_of(ddp, rank, step).backward()
        traces = torch.tensor([[hasattr(grad, "mark"), grad.requires_grad] for grad in grads(ddp)])
        yield snapshot(ddp, traces=traces)
        for param in ddp.parameters():
            what(param)
        yield snapshot(ddp)


def accumulates(wrap: Wrap, rank: int, locally: Sequence[int]) -> Steps:
    """Under `no_sync` in some steps, and with the next one together."""
    ddp = wrap(narrow())
    for step in range(STEPS + 2):
        if step - 1 not in locally:
            ddp.zero_grad()
        with ddp.no_sync() if step in locally else nullcontext():
            loss_of(ddp, rank, step).backward()
        yield snapshot(ddp)
