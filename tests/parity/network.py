"""The model of a script: layers in a row, and a route that says in which order and how they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity.layers import WIDTH, Batch, Checkpointed, SeesBatch, Tied, build

CLASSES = 8


@dataclass(frozen=True)
class Use:
    """One stop of a route: layers, one after the other; "plain", "checkpoint", "reentrant" or "nested"."""

    layers: tuple[int, ...]
    how: str = "plain"


class Interrupted(Exception):
    """Raised in forward or in backward because the script says so."""


@dataclass
class Output:
    """The dataclass that forward returns where the output is a "dataclass"."""

    main: torch.Tensor
    aux: torch.Tensor
    count: int = 3


class OpaqueOutput:
    """Holds the output where no wrapper looks for tensors."""

    def __init__(self, *tensors: torch.Tensor):
        self.tensors = tensors


class _Fuse(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise Interrupted("the script interrupts this backward")


class _Nested(torch.autograd.Function):
    """Runs `module`; its backward calls backward on a graph of its own, which reaches the module's parameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.inner = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.result = module(ctx.inner)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.autograd.backward(ctx.result, grads[0])
        return ctx.inner.grad, None


class Network(nn.Module):
    """Layers that map (batch, WIDTH) to the same, and a head.

    `route` says which layers the input passes; `straight` is the route that uses each once. `output` is what
    forward returns, a key of `OUTPUTS`. `fails_at` is the stop of the route before which forward fails (`fails_in`
    "forward") or before which backward does.
    """

    def __init__(self, layers: Sequence[str]):
        super().__init__()
        self.layers = nn.ModuleList(map(build, layers))
        _tie(self.layers)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.frozen_from_the_start = {name for name, param in self.named_parameters() if not param.requires_grad}
        self.straight = tuple(Use((index,)) for index in range(len(layers)))
        self.route = self.straight
        self.output = "tensor"
        self.fails_in: str | None = None
        self.fails_at = 0

    def thaw(self) -> None:
        """All parameters require grad again, but those that never did."""
        for name, param in self.named_parameters():
            param.requires_grad_(name not in self.frozen_from_the_start)

    def needs_grad_of_input(self) -> bool:
        """Reentrant checkpoints pass no gradient on unless their input wants one."""
        return any(use.how in ("reentrant", "nested") for use in self.route) or any(
            isinstance(layer, Checkpointed) and layer.reentrant for layer in self.modules()
        )

    def forward(self, batch: Batch) -> Any:
        for layer in self.modules():
            if isinstance(layer, SeesBatch):
                layer.look_at(batch)
        x = batch.x
        for stop, use in enumerate(self.route):
            x = self._pass_stop(x) if stop == self.fails_at else x
            x = x + torch.tanh(_apply(use, nn.Sequential(*(self.layers[index] for index in use.layers)), x))
        if self.fails_at >= len(self.route):
            x = self._pass_stop(x)
        if self.output == "two heads":  # which share no parameter
            return self.head(x.detach()), x
        return OUTPUTS[self.output](self, batch, self.head(x), x)

    def _pass_stop(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails_in == "forward":
            raise Interrupted("the script interrupts this forward")
        return _Fuse.apply(x) if self.fails_in == "backward" else x


#: What forward returns, from the module, its input, the head's result and what the head was given.
OUTPUTS: dict[str, Callable[[Network, Batch, torch.Tensor, torch.Tensor], Any]] = {
    "tensor": lambda model, batch, main, hidden: main,
    "tuple": lambda model, batch, main, hidden: (main, [hidden, None]),
    "dict": lambda model, batch, main, hidden: {"main": main, "aux": hidden, "count": 3},
    "dataclass": lambda model, batch, main, hidden: Output(main, hidden),
    "object": lambda model, batch, main, hidden: OpaqueOutput(main, hidden),
    "with parameter": lambda model, batch, main, hidden: (main, next(model.parameters())),
    "with input": lambda model, batch, main, hidden: (main, batch.x),
    "with buffers": lambda model, batch, main, hidden: (
        main,
        [b for b in model.buffers() if b.is_floating_point()],
    ),
    "view": lambda model, batch, main, hidden: main.t().t(),
    "with view": lambda model, batch, main, hidden: (main, main.view(-1)),
    "with detached": lambda model, batch, main, hidden: (main, main.detach()),
    "twice": lambda model, batch, main, hidden: [main, main],
}


def _apply(use: Use, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if use.how == "nested":
        return _Nested.apply(x, module)
    if use.how in ("checkpoint", "reentrant"):
        return checkpoint(module, x, use_reentrant=use.how == "reentrant")
    return module(x)


def _tie(layers: nn.ModuleList) -> None:
    """Each `Tied` layer shares the weight of the first linear layer before it, if there is one."""
    for index, layer in enumerate(layers):
        earlier = [other for other in layers[:index] if isinstance(other, nn.Linear)]
        if isinstance(layer, Tied) and earlier:
            layer.weight = earlier[0].weight
