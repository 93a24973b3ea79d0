"""The models whose steps are timed, each the hard case of another part of data parallelism.

`many_small` is bookkeeping per parameter, `wide_mlp` is bytes moved, `transformer` is what people train, `convnet`
has buffers to keep in step, and of an `embedding`'s gradient nearly all is zero, which `embedding_sparse` does not
send.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

WorkloadName = Literal["many_small", "transformer", "wide_mlp", "convnet", "embedding", "embedding_sparse"]


@dataclass(frozen=True)
class Workload:
    """One model, the data it is fed, and how long a turn of it should be."""

    name: str
    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]  #: inputs, targets; the first axis is the examples
    loss: Callable[[Tensor, Tensor], Tensor]
    learning_rate: float
    steps_per_turn: int  #: timed steps in a row; see [Note: paired rounds]
    has_sparse_gradients: bool = False


def workload(name: WorkloadName, *, tiny: bool = False) -> Workload:
    """The workload called `name`; a `tiny` one has the same parts and takes no time."""
    makers = {
        "many_small": many_small,
        "transformer": transformer,
        "wide_mlp": wide_mlp,
        "convnet": convnet,
        "embedding": embedding,
        "embedding_sparse": embedding_sparse,
    }
    return makers[name](tiny)


def many_small(tiny: bool) -> Workload:
    """200 linear layers of 64: 400 tensors of at most 16 KiB, so each parameter's fixed costs dominate."""
    depth, width, batch_size = (8 if tiny else 200), (8 if tiny else 64), 16
    return Workload(
        name="many_small",
        title=f"{depth} linear layers of {width}",
        model=lambda: orthogonal_chain(depth, width),
        batch=lambda rng: (_normal(rng, batch_size, width), _normal(rng, batch_size, width)),
        loss=nn.functional.mse_loss,
        learning_rate=1e-4,
        steps_per_turn=5,
    )


def transformer(tiny: bool) -> Workload:
    """A causal byte-level transformer; compute and communication overlap."""
    layers, width, heads, sequence = (1, 16, 2, 8) if tiny else (4, 192, 6, 64)
    batch_size, vocabulary = 4, 256
    return Workload(
        name="transformer",
        title=f"transformer, {layers} layers of {width}",
        model=lambda: ByteTransformer(vocabulary, width, layers, heads, sequence),
        batch=lambda rng: (
            torch.randint(vocabulary, (batch_size, sequence), generator=rng),
            torch.randint(vocabulary, (batch_size, sequence), generator=rng),
        ),
        loss=lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        learning_rate=1e-2,
        steps_per_turn=2,
    )


def wide_mlp(tiny: bool) -> Workload:
    """4 linear layers of 2048 x 2048 and a small batch: 64 MiB of gradients, so moving bytes dominates."""
    width, batch_size = (32 if tiny else 2048), 8
    return Workload(
        name="wide_mlp",
        title=f"MLP, 4 x {width} x {width}",
        model=lambda: orthogonal_chain(4, width),
        batch=lambda rng: (_normal(rng, batch_size, width), _normal(rng, batch_size, width)),
        loss=nn.functional.mse_loss,
        learning_rate=1e-4,
        steps_per_turn=1,
    )


def convnet(tiny: bool) -> Workload:
    """A residual network of 3x3 convolutions with BatchNorm, whose running statistics are broadcast every step."""
    widths, side, batch_size = ((4, 8), 8, 2) if tiny else ((32, 64, 128), 16, 8)
    classes = 10
    return Workload(
        name="convnet",
        title=f"conv net with BatchNorm, {len(widths)} stages",
        model=lambda: ConvNet(widths, classes),
        batch=lambda rng: (
            _normal(rng, batch_size, 3, side, side),
            torch.randint(classes, (batch_size,), generator=rng),
        ),
        loss=nn.functional.cross_entropy,
        learning_rate=1e-2,
        steps_per_turn=3,
    )


def embedding(tiny: bool) -> Workload:
    """A table of 65,536 rows of 128, of which a step uses a few hundred: 32 MiB of gradients, nearly all zero."""
    return _embedding("embedding", tiny, sparse=False)


def embedding_sparse(tiny: bool) -> Workload:
    """The same with sparse=True: only the rows that were used have a gradient, and only they travel."""
    return _embedding("embedding_sparse", tiny, sparse=True)


def _embedding(name: WorkloadName, tiny: bool, *, sparse: bool) -> Workload:
    rows, width = (64, 8) if tiny else (65_536, 128)
    batch_size, tokens = 32, 16
    return Workload(
        name=name,
        title=f"embedding of {rows:,} rows{', sparse' if sparse else ''}",
        model=lambda: BagOfTokens(rows, width, sparse=sparse),
        batch=lambda rng: (
            torch.randint(rows, (batch_size, tokens), generator=rng),
            _normal(rng, batch_size, width),
        ),
        loss=nn.functional.mse_loss,
        learning_rate=1e-2,
        steps_per_turn=3 if sparse else 2,
        has_sparse_gradients=sparse,
    )


def training_step(
    model: nn.Module, task: Workload, rank: int, after_backward: Callable[[], object] | None = None
) -> Callable[[], None]:
    """One step of SGD on a batch of the rank's own: clear the gradients, forward, backward, update."""
    inputs, targets = batch_of(task, rank, device_of(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        task.loss(model(inputs), targets).backward()
        if after_backward is not None:
            after_backward()
        optimizer.step()

    return step


def batch_of(task: Workload, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The batch that `rank` trains on, again and again."""
    inputs, targets = task.batch(torch.Generator().manual_seed(1000 + rank))
    return inputs.to(device), targets.to(device)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def orthogonal_chain(depth: int, width: int) -> nn.Sequential:
    """`depth` square linear layers that keep the norm of what passes through.

    With torch's default initialisation, a signal shrinks at every layer: after 200 of them gradients would be
    denormal numbers, whose slow arithmetic would be timed instead of DDP.
    """
    layers = [nn.Linear(width, width) for _ in range(depth)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class ByteTransformer(nn.Module):
    """`[batch, sequence]` int64 bytes in, `[batch, sequence, vocabulary]` float32 logits out."""

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
