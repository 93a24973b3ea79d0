"""The models whose steps are timed, each the hard case of another part of data parallelism.

`many_small` is bookkeeping per parameter, `wide_mlp` is bytes moved, `transformer` is a usual model, `convnet` has
buffers to keep in step, `short` is the latency of few messages, and of an `embedding`'s gradient nearly all is
zero, which `embedding_sparse` does not send.

[Note: sizes]
A workload has the same parts in each size. "full" is for ranks of one CPU core each; on a GPU such a model would be
nothing but kernel launches, so "gpu" is larger; "tiny" takes no time, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

WorkloadName = Literal["many_small", "transformer", "wide_mlp", "convnet", "embedding", "embedding_sparse", "short"]
Size = Literal["tiny", "full", "gpu"]
Step = Callable[[], object]


@dataclass(frozen=True)
class Workload:
    """One model, its data, and the length of a turn of it."""

    name: str
    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]  #: inputs, targets; the first axis is the examples
    loss: Callable[[Tensor, Tensor], Tensor]
    learning_rate: float
    steps_per_turn: int  #: timed steps in a row; see [Note: paired rounds]
    has_sparse_gradients: bool = False
    own_loss: Callable[[nn.Module], Tensor] | None = None  #: of a model of the user's, which has batches of its own

    def objective(self, rank: int, device: torch.device) -> Callable[[nn.Module], Tensor]:
        """The loss of a model on the batch of `rank`."""
        if self.own_loss is not None:
            return self.own_loss
        inputs, targets = batch_of(self, rank, device)
        return lambda model: self.loss(model(inputs), targets)

    def share(self, parts: int) -> Workload:
        """The same model, with one of so many parts of the batch for each rank."""

        def batch(rng: torch.Generator) -> tuple[Tensor, Tensor]:
            inputs, targets = self.batch(rng)
            count = max(1, len(inputs) // parts)
            return inputs[:count], targets[:count]

        return replace(self, batch=batch)


def workload(name: WorkloadName, size: Size = "full") -> Workload:
    """The workload called `name`. See [Note: sizes]."""
    makers: dict[str, Callable[[str, Size], Workload]] = {
        "many_small": partial(chain, depths=(8, 200, 1000), width=64, batch_size=16, steps_per_turn=5),
        "wide_mlp": partial(chain, depths=(4, 4, 4), width=2048, batch_size=8, steps_per_turn=1),
        "short": partial(chain, depths=(8, 12, 12), width=256, batch_size=16, steps_per_turn=8),
        "transformer": transformer,
        "convnet": convnet,
        "embedding": partial(embedding, is_sparse=False),
        "embedding_sparse": partial(embedding, is_sparse=True),
    }
    return makers[name](name, size)


def chain(
    name: str, size: Size, depths: tuple[int, int, int], width: int, batch_size: int, steps_per_turn: int
) -> Workload:
    """Linear layers, one after another.

    With 200 of 64 there are 400 tensors of at most 16 KiB: each parameter's fixed costs dominate. With 4 of 2048
    there are 64 MiB of gradients: moving bytes dominates. With 12 of 256 a step is over in some milliseconds.
    """
    layers, wide = depths[get_args(Size).index(size)], max(8, width // 64) if size == "tiny" else width
    return Workload(
        name,
        f"MLP, {layers} x {wide} x {wide}" if name == "wide_mlp" else f"{layers:,} linear layers of {wide}",
        lambda: orthogonal_chain(layers, wide),
        lambda rng: (_normal(rng, batch_size, wide), _normal(rng, batch_size, wide)),
        nn.functional.mse_loss,
        learning_rate=1e-4,
        steps_per_turn=steps_per_turn,
    )


def transformer(name: str, size: Size) -> Workload:
    """A causal transformer of bytes; compute and communication overlap. On a GPU it is as large as GPT-2 small."""
    layers, width, heads = {"tiny": (1, 16, 2), "full": (4, 192, 6), "gpu": (12, 768, 12)}[size]
    shape = {"tiny": (4, 8), "full": (4, 64), "gpu": (8, 512)}[size]  # examples, their tokens
    vocabulary = 50_257 if size == "gpu" else 256
    return Workload(
        name,
        f"transformer, {layers} layers of {width}",
        lambda: Transformer(vocabulary, width, layers, heads, sequence=shape[1]),
        lambda rng: (_integers(rng, vocabulary, *shape), _integers(rng, vocabulary, *shape)),
        lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        learning_rate=1e-2,
        steps_per_turn=2,
    )


def convnet(name: str, size: Size) -> Workload:
    """A residual network of 3x3 convolutions with BatchNorm, whose running statistics are broadcast every step."""
    widths = {"tiny": (4, 8), "full": (32, 64, 128), "gpu": (64, 128, 256, 512, 1024)}[size]
    batch_size, side = {"tiny": (2, 8), "full": (8, 16), "gpu": (64, 112)}[size]
    return Workload(
        name,
        f"conv net with BatchNorm, {len(widths)} stages",
        lambda: ConvNet(widths, classes=10),
        lambda rng: (_normal(rng, batch_size, 3, side, side), _integers(rng, 10, batch_size)),
        nn.functional.cross_entropy,
        learning_rate=1e-2,
        steps_per_turn=3,
    )


def embedding(name: str, size: Size, is_sparse: bool) -> Workload:
    """A table of 65,536 rows of 128; a step uses a few hundred: 32 MiB of gradients, nearly all zero.

    If it is sparse, only the rows that were used have a gradient, and only they travel.
    """
    rows, width = (64, 8) if size == "tiny" else (65_536, 128)
    return Workload(
        name,
        f"embedding of {rows:,} rows{', sparse' if is_sparse else ''}",
        lambda: BagOfTokens(rows, width, sparse=is_sparse),
        lambda rng: (_integers(rng, rows, 32, 16), _normal(rng, 32, width)),
        nn.functional.mse_loss,
        learning_rate=1e-2,
        steps_per_turn=3 if is_sparse else 2,
        has_sparse_gradients=is_sparse,
    )


# ------------------------------------------------------------------ a step


def training_step(
    model: nn.Module,
    task: Workload,
    rank: int,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> Callable[[], None]:
    """One step of SGD on a batch of the rank's own: clear the gradients, forward, backward, update."""
    loss, optimizer = (
        task.objective(rank, device_of(model)),
        make_optimizer(model.parameters(), lr=task.learning_rate),
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model).backward()
        optimizer.step()

    return step


def batch_of(task: Workload, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The batch of `rank`, the same in every step."""
    inputs, targets = task.batch(torch.Generator().manual_seed(1000 + rank))
    return inputs.to(device), targets.to(device)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


# ------------------------------------------------------------------ models


def orthogonal_chain(depth: int, width: int) -> nn.Sequential:
    """`depth` square linear layers that keep the norm of their input.

    With torch's default initialisation, a signal shrinks at every layer: after 200 of them gradients would be
    denormal numbers, whose slow arithmetic would be timed instead of DDP.
    """
    layers = [nn.Linear(width, width) for _ in range(depth)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Transformer(nn.Module):
    """`[batch, sequence]` int64 tokens in, `[batch, sequence, vocabulary]` float32 logits out."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, sequence: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(sequence, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(sequence), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token(tokens) + self.position(places)
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


class ConvNet(nn.Module):
    """`[batch, 3, side, side]` float32 images in, `[batch, classes]` float32 logits out."""

    def __init__(self, widths: tuple[int, ...], classes: int):
        super().__init__()
        self.stem = _convolution(3, widths[0])
        self.stages = nn.Sequential(
            *(Residual(before, after) for before, after in zip(widths, widths[1:] + widths[-1:], strict=True))
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


class Residual(nn.Module):
    """Two convolutions beside a shortcut; where there are more channels behind it, half the resolution."""

    def __init__(self, before: int, after: int):
        super().__init__()
        stride = 1 if before == after else 2
        self.body = nn.Sequential(_convolution(before, after, stride), nn.ReLU(), _convolution(after, after))
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.relu(self.body(images) + self.shortcut(images))


def _convolution(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after))


class BagOfTokens(nn.Module):
    """`[batch, tokens]` int64 in; the mean of their embeddings, through two layers: `[batch, width]` float32."""

    def __init__(self, rows: int, width: int, *, sparse: bool):
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.table(tokens).mean(dim=1))


def _normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng)


def _integers(rng: torch.Generator, end: int, *shape: int) -> Tensor:
    return torch.randint(end, shape, generator=rng)
