"""Habits with hooks on parameters, and a communication hook."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from tests.features.beside import Steps, Wrap
from tests.features.habits.model import (
    CALM_STEPS,
    grads,
    hook_all,
    layers,
    narrow,
    numbered,
    trained,
)


def keeps_what_arrives(wrap: Wrap, rank: int) -> Steps:
    """A hook keeps what is on its way to the parameter, and may become its `.grad`."""
    ddp, kept = wrap(layers()), []
    for param in ddp.parameters():
        param.register_hook(lambda grad: kept.append(grad))
    yield from trained(ddp, rank)
    yield numbered(kept)


def looks_from_accumulators(wrap: Wrap, rank: int) -> Steps:
    """Hooks on the accumulators, beside DDP's own, see what this rank has computed."""
    ddp = wrap(layers())
    seen: list[torch.Tensor] = []
    nodes = [get_gradient_edge(param).node for param in ddp.parameters()]
    for node, param in zip(nodes, ddp.parameters(), strict=True):
        node.register_hook(lambda *_, param=param: seen.append(param.grad.clone()))
    for taken in trained(ddp, rank):
        yield taken | numbered(seen)
        seen.clear()


def looks_at_others(wrap: Wrap, rank: int) -> Steps:
    """The hook that comes last looks at gradients that have been packed, and perhaps reduced, before."""
    ddp = wrap(layers())
    seen: list[torch.Tensor] = []
    ddp.module[0].weight.register_post_accumulate_grad_hook(
        lambda _: seen.extend(grad.clone() for grad in grads(ddp))
    )
    for taken in trained(ddp, rank):
        yield taken | numbered(seen)
        seen.clear()


def flattens(wrap: Wrap, rank: int, wraps_first: bool) -> Steps:
    """Hooks move each gradient into one flat buffer. DDP's own hooks are there before them, or after."""
    module = layers()
    ddp = wrap(module) if wraps_first else None
    params = list(module.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    for param, place in zip(params, flat.split([param.numel() for param in params]), strict=True):

        def move(param: torch.Tensor, place: torch.Tensor = place) -> None:
            assert param.grad is not None
            place.view_as(param).copy_(param.grad)
            param.grad = place.view_as(param)

        param.register_post_accumulate_grad_hook(move)
    for taken in trained(ddp or wrap(module), rank):
        yield taken | {"flat": flat.clone()}


def steps_in_hooks(wrap: Wrap, rank: int, to_none: bool) -> Steps:
    """An optimizer in backward: what arrives is used up before it can be reduced."""
    ddp = wrap(narrow())

    def step(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.data -= 0.01 * param.grad
        if to_none:
            param.grad = None
        else:
            param.grad.zero_()

    hook_all(ddp, step)
    yield from trained(ddp, rank)


def replaces_all_at_the_end(wrap: Wrap, rank: int, what: str) -> Steps:
    """The hook that comes last does something to each gradient that has been packed, except those of its layer."""
    ddp = wrap(layers())
    others = list(ddp.module[2:].parameters())

    def change(_param: torch.Tensor) -> None:
        for other in others:
            match what:
                case "clears":
                    other.grad.zero_()
                case "drops":
                    other.grad = None
                case "replaces":
                    other.grad = torch.zeros_like(other)
                case "wraps anew":
                    other.grad = other.grad.detach()
                case "puts data":
                    other.grad.data = torch.zeros_like(other)

    ddp.module[0].weight.register_post_accumulate_grad_hook(change)
    yield from trained(ddp, rank)


def restores(wrap: Wrap, rank: int, detaches: bool) -> Steps:
    """From the middle on, hooks move what arrives into a tensor that was the gradient once, and now is again."""
    ddp = wrap(layers())
    kept: dict[torch.Tensor, torch.Tensor] = {}

    def restore(param: torch.Tensor) -> None:
        if param in kept:
            param.grad = kept[param].copy_(param.grad)

    hook_all(ddp, restore)
    for step, taken in enumerate(trained(ddp, rank)):
        yield taken
        if step == CALM_STEPS:
            kept = {p: p.grad.detach() if detaches else p.grad for p in ddp.parameters()}


def reduces_by_a_hook(wrap: Wrap, rank: int, kinds: Sequence[str]) -> Steps:
    """A communication hook that gives the bucket's own tensor, a copy, or another tensor of the same memory."""
    ddp = wrap(narrow())
    kind = itertools.cycle(kinds)

    def reduced(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        gives = next(kind)

        def after(future: torch.futures.Future) -> torch.Tensor:
            [tensor] = future.value()
            return {"itself": tensor, "copy": tensor / 2, "alias": tensor[:]}[gives]

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(after)

    ddp.register_comm_hook(None, lambda _state, bucket: reduced(bucket))
    yield from trained(ddp, rank)
