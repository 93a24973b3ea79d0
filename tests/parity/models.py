"""The models that scenarios name: every kind of layer, and the network that puts them in a row.

All blocks map a float32 tensor of shape (batch, WIDTH) to one of the same shape, whatever dtype they compute
in, so that any sequence of them is a model. Weights have thousands of elements: from three ranks on, gloo's
ring adds up in an order that depends on the offset in the bucket, and short tensors would not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity.scenario import Layer, Model

WIDTH = 64  # also 4 channels of 4 x 4 pixels for convolutions
VOCABULARY = 40
CLASSES = 8


@dataclass(frozen=True)
class Batch:
    """Input of one forward on one rank.

    `x` is float32 of shape (batch, WIDTH), `tokens` int64 of shape (batch,). `rank` and `turn` are what the
    branches of a model may depend on, besides `x` itself.
    """

    x: torch.Tensor
    tokens: torch.Tensor
    rank: int
    turn: int


class Block(nn.Module):
    """Base of the layers: `apply_to(x, batch)` in the layer's own dtype, x being the previous block's output."""

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        raise NotImplementedError


class Plain(Block):
    """A standard module of (batch, WIDTH) -> (batch, WIDTH)."""

    def __init__(self, inner: nn.Module, uses: int = 1):
        super().__init__()
        self.inner = inner
        self.uses = uses

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        for _ in range(self.uses):
            x = self.inner(x)
        return x


class Conv(Block):
    """A 3x3 convolution over x seen as images."""

    def __init__(self, memory_format: torch.memory_format):
        super().__init__()
        self.conv = nn.Conv2d(4, 32, 3, padding=1).to(memory_format=memory_format)

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        images = self.conv(x.view(-1, 4, 4, 4))
        return images.reshape(-1, 8, WIDTH).mean(1)


class Embedding(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x + self.table(batch.tokens)


class Tied(Block):
    """A linear layer whose weight is the *same* Parameter as that of an earlier one."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight)


class Scale(Block):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(()) + 0.5)

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x * self.factor


class Empty(Block):
    """A parameter without elements, but with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x + self.nothing.sum()


class Strided(Block):
    """A matrix that does not lie row by row: transposed (dense) or every second column of another (not dense)."""

    def __init__(self, dense: bool):
        super().__init__()
        matrix = torch.randn(WIDTH, WIDTH).t() if dense else torch.randn(WIDTH, 2 * WIDTH)[:, ::2]
        self.matrix = nn.Parameter(matrix / WIDTH)

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x @ self.matrix


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + weight.mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class NoGradient(Block):
    """A weight in the graph whose gradient is None: its hook fires without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return _WithoutGradient.apply(x, self.weight)


class Unused(Block):
    """Parameters that forward never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, 16)

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x


class Branch(Block):
    """Two ways through; the rank, the turn of the script, or the input decides."""

    def __init__(self, decided_by: str):
        super().__init__()
        self.decided_by = decided_by
        self.ways = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)])

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        decisions = {"rank": batch.rank, "turn": batch.turn, "input": int(batch.x[0, 0] > 0)}
        return self.ways[decisions[self.decided_by] % 2](x)


class Checkpointed(Block):
    """A linear layer whose forward runs again in backward."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant
        self.linear = nn.Linear(WIDTH, WIDTH)

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return checkpoint(self.linear, x, use_reentrant=self.reentrant)


class RunningMean(Block):
    """Buffers that forward replaces (a mean) and changes in place (a counter), one of them not in state_dict."""

    mean: torch.Tensor
    count: torch.Tensor
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def apply_to(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.last.copy_(x.detach()[0])
        return x - self.mean


LAYERS: dict[str, Callable[[], Block]] = {
    "linear": lambda: Plain(nn.Linear(WIDTH, WIDTH)),
    "twice": lambda: Plain(nn.Linear(WIDTH, WIDTH), uses=2),
    "conv": lambda: Conv(torch.contiguous_format),
    "conv_channels_last": lambda: Conv(torch.channels_last),
    "batch_norm": lambda: Plain(nn.BatchNorm1d(WIDTH)),
    "layer_norm": lambda: Plain(nn.LayerNorm(WIDTH)),
    "group_norm": lambda: Plain(nn.GroupNorm(4, WIDTH)),
    "dropout": lambda: Plain(nn.Dropout(0.2)),
    "embedding": Embedding,
    "tied": lambda: Tied(nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)),
    "scale": Scale,
    "empty": Empty,
    "transposed": lambda: Strided(dense=True),
    "sliced": lambda: Strided(dense=False),
    "no_gradient": NoGradient,
    "unused": Unused,
    "branch_rank": lambda: Branch("rank"),
    "branch_turn": lambda: Branch("turn"),
    "branch_input": lambda: Branch("input"),
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed_reentrant": lambda: Checkpointed(reentrant=True),
    "running_mean": RunningMean,
}


class InterruptedBackward(Exception):
    """Raised by a hook in the middle of backward, because the script says so."""


@dataclass
class Output:
    """The dataclass that forward returns where `Model.output` is "dataclass"."""

    main: torch.Tensor
    aux: torch.Tensor
    count: int = 3


class Network(nn.Module):
    """The model of a scenario.

    With `interrupt_depth` backward fails after the heads and that many blocks, less one; at the very start if
    that is 0, or if nothing deeper has a gradient.
    """

    def __init__(self, spec: Model):
        super().__init__()
        self.spec = spec
        self.interrupt_depth: int | None = None
        self.blocks = nn.ModuleList(_build_all(spec.layers))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.aux = nn.Linear(WIDTH, CLASSES) if spec.output != "tensor" else None

    def forward(self, batch: Batch) -> Any:
        x, interrupted = batch.x, False
        order = list(zip(self.spec.layers, self.blocks, strict=True))
        for place, (layer, block) in enumerate(reversed(order) if self.spec.reversed_use else order):
            x = x + torch.tanh(block.apply_to(x.to(getattr(torch, layer.dtype)), batch).float())
            if self.interrupt_depth == len(order) - place and x.requires_grad:
                x.register_hook(_interrupt)
                interrupted = True
        main = self.head(x)
        if self.interrupt_depth is not None and not interrupted:
            main.register_hook(_interrupt)
        if self.aux is None:
            return main
        aux = self.aux(x)
        if self.spec.output == "tuple":
            return main, [aux, None]
        return {"main": main, "aux": aux, "count": 3} if self.spec.output == "dict" else Output(main, aux)


def _interrupt(grad: torch.Tensor) -> None:
    raise InterruptedBackward("the script interrupts this backward")


def _build_all(layers: Sequence[Layer]) -> list[Block]:
    built: list[Block] = []
    for layer in layers:
        block = LAYERS[layer.kind]().to(getattr(torch, layer.dtype))
        partner = next((b.inner for b in built if isinstance(b, Plain) and isinstance(b.inner, nn.Linear)), None)
        if isinstance(block, Tied) and partner is not None:
            block.weight = partner.weight
        params = list(block.parameters())
        for param in {"none": [], "first": params[:1], "all": params}[layer.frozen]:
            param.requires_grad_(False)
        built.append(block)
    return built
