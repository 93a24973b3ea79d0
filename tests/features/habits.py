"""Habits of training loops, as scripts: with gradients, with hooks, and with several wrappers.

The model has gradients large enough to be aliased, and others that are too small ([Note: gradient aliasing]).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tests.features.beside import Snapshot, Steps, Wrap, random, snapshot

WIDTH = 128  # a weight of 128 x 128 floats is just large enough to be aliased
STEPS = 6
CALM_STEPS = 3  # before something changes: one per plan, and one more


def layers() -> nn.Sequential:
    """Two layers with large weights and one with a small one. All begin where a fresh allocation could."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 16)
    )


def loss_of(ddp: Any, rank: int, step: int) -> torch.Tensor:
    return ddp(random(4, WIDTH, rank=rank, step=step)).square().sum()


def losses(ddp: Any, rank: int) -> Iterator[tuple[int, torch.Tensor]]:
    """`(step, loss)` of each step, which begins without gradients."""
    for step in range(STEPS):
        ddp.zero_grad()
        yield step, loss_of(ddp, rank, step)


def trained(ddp: Any, rank: int) -> Steps:
    """Ordinary steps."""
    for _step, loss in losses(ddp, rank):
        loss.backward()
        yield snapshot(ddp)


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


def hook_all(ddp: nn.Module, hook: Callable[[Any], object]) -> None:
    for param in ddp.parameters():
        param.register_post_accumulate_grad_hook(hook)


def numbered(tensors: Sequence[torch.Tensor]) -> Snapshot:
    return {str(number): tensor.detach().clone() for number, tensor in enumerate(tensors)}


def narrow() -> nn.Sequential:
    """Twenty layers, none of them large, together more than one run holds ([Note: packing in runs])."""
    return nn.Sequential(*(nn.Linear(WIDTH, 64) if index % 2 == 0 else nn.Linear(64, WIDTH) for index in range(20)))


# ------------------------------------------------------------------ several backwards; gradients kept or replaced


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


# ------------------------------------------------------------------ hooks on parameters, and a communication hook


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


# ------------------------------------------------------------------ wrappers, and changes


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
