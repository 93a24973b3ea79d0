"""Habits around backward and `.grad`: several backwards; gradients over several steps, kept or replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.features.beside import Steps, Wrap, snapshot
from tests.features.habits.model import (
    CALM_STEPS,
    STEPS,
    WIDTH,
    grads,
    layers,
    loss_of,
    losses,
    narrow,
    numbered,
)


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
