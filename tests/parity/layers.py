"""The layers of a script's model.

All layers map a float32 tensor of shape (batch, WIDTH) to one of the same shape. Weights have thousands of
elements: from three ranks on, gloo's ring adds up in an order that depends on the offset in the bucket, and short
tensors would not show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.modules import WithoutGradient

WIDTH = 128  # a weight of 128 x 128 floats has 64 KiB: just large enough for its gradient to alias a bucket
VOCABULARY = 40


@dataclass(frozen=True)
class Batch:
    """The input of one forward on one rank.

    `x` is float32 of shape (batch, WIDTH), `tokens` int64 of shape (batch,). Branches of a model may depend on
    `rank` and `turn`, besides `x` itself.
    """

    x: torch.Tensor
    tokens: torch.Tensor
    rank: int
    turn: int


class SeesBatch(nn.Module):
    """A layer that depends on more than its input: `look_at` is called before each forward of the network."""

    def look_at(self, batch: Batch) -> None:
        raise NotImplementedError


class Embedding(SeesBatch):
    """Adds what a table has for the tokens."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.tokens = torch.zeros(1, dtype=torch.int64)

    def look_at(self, batch: Batch) -> None:
        self.tokens = batch.tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(self.tokens)


class Branch(SeesBatch):
    """Two ways through; the rank, the turn of the script, or the input decides."""

    def __init__(self, decided_by: str):
        super().__init__()
        self.decided_by, self.way = decided_by, 0
        self.ways = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)])

    def look_at(self, batch: Batch) -> None:
        decisions = {"rank": batch.rank, "turn": batch.turn, "input": int(batch.x[0, 0] > 0)}
        self.way = decisions[self.decided_by] % 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ways[self.way](x)


class Unused(nn.Module):
    """Parameters that forward never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Conv(nn.Module):
    """A 3x3 convolution over x seen as images."""

    def __init__(self, memory_format: torch.memory_format):
        super().__init__()
        self.conv = nn.Conv2d(8, 32, 3, padding=1).to(memory_format=memory_format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.view(-1, 8, 4, 4)).reshape(-1, 4, WIDTH).mean(1)


class RunningMean(nn.Module):
    """Buffers that forward replaces (a mean) and changes in place (a counter), one of them not in state_dict."""

    mean: torch.Tensor
    count: torch.Tensor
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.last.copy_(x.detach()[0])
        return x - self.mean


def _weight() -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH) / WIDTH**0.5


class Halves(nn.Module):
    """One weight, used through two views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(_weight())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        upper, lower = self.weight[: WIDTH // 2], self.weight[WIDTH // 2 :].t()
        return torch.cat([F.linear(x, upper), x @ lower], dim=1)


class Strided(nn.Module):
    """A weight that does not lie row by row: transposed (dense) or every second column of another (not dense)."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Scalar(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Empty(nn.Module):
    """A parameter without elements, but with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.nothing.sum()


class Undefined(nn.Module):
    """A weight whose gradient is undefined: a function returns none for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WithoutGradient.apply(x, self.weight)


class Tied(nn.Module):
    """A linear layer with the weight of an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(_weight())
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Checkpointed(nn.Module):
    """A linear layer whose forward runs again in backward."""

    def __init__(self, *, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, x, use_reentrant=self.reentrant)


class InDtype(nn.Module):
    """A layer that computes in another dtype than its neighbours."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.inner, self.dtype = inner.to(dtype), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.dtype)).float()


#: A layer is one of these, and may have traits: "large:bfloat16:first" is a linear layer in another dtype whose
#: first parameter is frozen.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "large": lambda: nn.Linear(WIDTH, WIDTH),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 160), nn.Tanh(), nn.Linear(160, WIDTH)),
    "small": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)),
    "tiny": lambda: nn.LayerNorm(WIDTH),
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "group norm": lambda: nn.GroupNorm(4, WIDTH),
    "dropout": lambda: nn.Dropout(0.2),
    "conv": lambda: Conv(torch.contiguous_format),
    "conv, channels last": lambda: Conv(torch.channels_last),
    "scalar": Scalar,
    "empty": Empty,
    "tied": Tied,
    "halves": Halves,
    "transposed": lambda: Strided(_weight().t()),
    "sliced": lambda: Strided(torch.cat([_weight(), _weight()], 1)[:, ::2]),
    "embedding": Embedding,
    "sparse": lambda: Embedding(sparse=True),
    "undefined": Undefined,
    "running mean": RunningMean,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "reentrant": lambda: Checkpointed(reentrant=True),
    "unused": Unused,
    "branch by rank": lambda: Branch("rank"),
    "branch by turn": lambda: Branch("turn"),
    "branch by input": lambda: Branch("input"),
}
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}
#: Which of a layer's parameters are frozen.
FROZEN = {"first": slice(1), "last": slice(-1, None), "all": slice(None)}


def kind_of(layer: str) -> str:
    """Its name without traits."""
    return layer.partition(":")[0]


def build(layer: str) -> nn.Module:
    kind, *traits = layer.split(":")
    module = LAYERS[kind]()
    for trait in traits:
        if trait in DTYPES:
            module = InDtype(module, DTYPES[trait])
        else:
            for param in list(module.parameters())[FROZEN[trait]]:
                param.requires_grad_(False)
    return module
