"""The model of a script: layers in a row, and a route that says in which order and how they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity.models import Batch, InterruptedBackward, Output

WIDTH = 128  # a weight of 128 x 128 floats has 64 KiB: just large enough for its gradient to alias a bucket
VOCABULARY = 40
CLASSES = 8


@dataclass(frozen=True)
class Use:
    """One stop of a route: layers, one after the other; "plain", "checkpoint", "reentrant" or "nested"."""

    layers: tuple[int, ...]
    how: str = "plain"


class Interrupted(Exception):
    """Raised in forward because the script says so."""


class OpaqueOutput:
    """Holds the output where no wrapper looks for tensors."""

    def __init__(self, *tensors: torch.Tensor):
        self.tensors = tensors


class Embedding(nn.Module):
    """Adds what a table has for the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.tokens = torch.zeros(1, dtype=torch.int64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(self.tokens)


class SparseEmbedding(Embedding):
    """Its table's gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=True)


class Halves(nn.Module):
    """One weight, used through two views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        upper, lower = self.weight[: WIDTH // 2], self.weight[WIDTH // 2 :].t()
        return torch.cat([F.linear(x, upper), x @ lower], dim=1)


class Transposed(nn.Module):
    """A weight that is dense, but does not lie row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(WIDTH, WIDTH) / WIDTH**0.5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Scalar(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Undefined(nn.Module):
    """A weight whose gradient is undefined: a function returns none for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _AddWithoutGradient.apply(x, self.weight)


class _AddWithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class Tied(nn.Module):
    """A linear layer with the weight of an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def _half_frozen() -> nn.Linear:
    linear = nn.Linear(WIDTH, WIDTH)
    linear.bias.requires_grad_(False)
    return linear


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "large": lambda: nn.Linear(WIDTH, WIDTH),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 160), nn.Tanh(), nn.Linear(160, WIDTH)),
    "small": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)),
    "tiny": lambda: nn.LayerNorm(WIDTH),
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "scalar": Scalar,
    "tied": Tied,
    "halves": Halves,
    "transposed": Transposed,
    "embedding": Embedding,
    "half_frozen": _half_frozen,
    "undefined": Undefined,
    "sparse": SparseEmbedding,
}


class _Fuse(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise InterruptedBackward("the script interrupts this backward")


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
        self.layers = nn.ModuleList(LAYERS[kind]() for kind in layers)
        _tie(self.layers)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.straight = tuple(Use((index,)) for index in range(len(layers)))
        self.route = self.straight
        self.output = "tensor"
        self.fails_in: str | None = None
        self.fails_at = 0

    def forward(self, batch: Batch) -> Any:
        for layer in self.layers:
            if isinstance(layer, Embedding):
                layer.tokens = batch.tokens
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
    "with parameter": lambda model, batch, main, hidden: (main, next(model.layers[0].parameters())),
    "with input": lambda model, batch, main, hidden: (main, batch.x),
    "with buffers": lambda model, batch, main, hidden: (
        main,
        [b for b in model.buffers() if b.is_floating_point()],
    ),
    "view": lambda model, batch, main, hidden: main.t().t(),
    "with view": lambda model, batch, main, hidden: (main, main.view(-1)),
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
