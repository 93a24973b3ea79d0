"""The models whose steps are timed, each the hard case of another part of data parallelism.

For two CPU cores: `many_small` is bookkeeping per parameter, `wide_mlp` is bytes moved, `transformer` is a usual
model, `convnet` has buffers to keep in step, `short` is the latency of few messages, and of an `embedding`'s gradient
nearly all is zero, which `embedding_sparse` does not send. On a GPU these would be nothing but kernel launches, so
it has larger ones, whose names begin with `gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

WorkloadName = Literal["many_small", "transformer", "wide_mlp", "convnet", "embedding", "embedding_sparse", "short"]
GpuWorkloadName = Literal["gpu_many_small", "gpu_resnet50", "gpu_gpt2"]


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


def workload(name: WorkloadName | GpuWorkloadName, *, tiny: bool = False) -> Workload:
    """The workload called `name`; a `tiny` one has the same parts and takes no time."""
    makers: dict[str, Callable[[str, bool], Workload]] = {
        "many_small": partial(chain, Chain(depth=200, width=64, batch_size=16, steps_per_turn=5)),
        "wide_mlp": partial(chain, Chain(depth=4, width=2048, batch_size=8, steps_per_turn=1)),
        "short": partial(chain, Chain(depth=12, width=256, batch_size=16, steps_per_turn=8)),
        "transformer": transformer,
        "convnet": convnet,
        "embedding": partial(embedding, is_sparse=False),
        "embedding_sparse": partial(embedding, is_sparse=True),
        "gpu_many_small": partial(chain, Chain(depth=1000, width=64, batch_size=32, steps_per_turn=4)),
        "gpu_resnet50": resnet50,
        "gpu_gpt2": gpt2,
    }
    return makers[name](name, tiny)


@dataclass(frozen=True)
class Chain:
    """Linear layers of `width`, one after another.

    With 200 of 64 there are 400 tensors of at most 16 KiB: each parameter's fixed costs dominate. With 4 of 2048
    there are 64 MiB of gradients: moving bytes dominates. With 12 of 256 a step is over in some milliseconds.
    """

    depth: int
    width: int
    batch_size: int
    steps_per_turn: int


def chain(sizes: Chain, name: str, tiny: bool) -> Workload:
    depth, width = (min(sizes.depth, 8), max(8, sizes.width // 64)) if tiny else (sizes.depth, sizes.width)
    return Workload(
        name,
        f"MLP, {depth} x {width} x {width}" if name == "wide_mlp" else f"{depth:,} linear layers of {width}",
        lambda: orthogonal_chain(depth, width),
        lambda rng: (_normal(rng, sizes.batch_size, width), _normal(rng, sizes.batch_size, width)),
        nn.functional.mse_loss,
        learning_rate=1e-4,
        steps_per_turn=sizes.steps_per_turn,
    )


def transformer(name: str, tiny: bool) -> Workload:
    """A causal byte-level transformer; compute and communication overlap."""
    layers, width, heads, sequence = (1, 16, 2, 8) if tiny else (4, 192, 6, 64)
    return Workload(
        name,
        f"transformer, {layers} layers of {width}",
        lambda: Transformer(256, width, layers, heads, sequence),
        lambda rng: (_integers(rng, 256, 4, sequence), _integers(rng, 256, 4, sequence)),
        _loss_of_tokens,
        learning_rate=1e-2,
        steps_per_turn=2,
    )


def gpt2(name: str, tiny: bool) -> Workload:
    """124 million parameters as GPT-2 small has them (Radford et al. 2019), the head tied to the embedding."""
    layers, width, heads, vocabulary = (2, 32, 2, 64) if tiny else (12, 768, 12, 50_257)
    batch_size, sequence = (2, 16) if tiny else (8, 512)
    return Workload(
        name,
        f"GPT-2 small, {batch_size} x {sequence} tokens",
        lambda: Transformer(vocabulary, width, layers, heads, sequence, is_tied=True),
        lambda rng: (_integers(rng, vocabulary, batch_size, sequence), _integers(rng, vocabulary, batch_size, sequence)),
        _loss_of_tokens,
        learning_rate=1e-3,
        steps_per_turn=3,
    )


def convnet(name: str, tiny: bool) -> Workload:
    """A residual network of 3x3 convolutions with BatchNorm, whose running statistics are broadcast every step."""
    widths, side, batch_size = ((4, 8), 8, 2) if tiny else ((32, 64, 128), 16, 8)
    return Workload(
        name,
        f"conv net with BatchNorm, {len(widths)} stages",
        lambda: ConvNet(widths, classes=10),
        lambda rng: (_normal(rng, batch_size, 3, side, side), _integers(rng, 10, batch_size)),
        nn.functional.cross_entropy,
        learning_rate=1e-2,
        steps_per_turn=3,
    )


def resnet50(name: str, tiny: bool) -> Workload:
    """ResNet-50 (He et al. 2015, with the stride in the 3x3 convolution) on images of 224 x 224."""
    side, batch_size, blocks = (32, 2, (1, 1, 1, 1)) if tiny else (224, 64, (3, 4, 6, 3))
    return Workload(
        name,
        f"ResNet-50, {batch_size} images",
        lambda: ResNet(blocks),
        lambda rng: (_normal(rng, batch_size, 3, side, side), _integers(rng, 1000, batch_size)),
        nn.functional.cross_entropy,
        learning_rate=1e-3,
        steps_per_turn=3,
    )


def embedding(name: str, tiny: bool, *, is_sparse: bool) -> Workload:
    """A table of 65,536 rows of 128; a step uses a few hundred: 32 MiB of gradients, nearly all zero.

    If it is sparse, only the rows that were used have a gradient, and only they travel.
    """
    rows, width = (64, 8) if tiny else (65_536, 128)
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
    """`[batch, sequence]` int64 tokens in, `[batch, sequence, vocabulary]` float32 logits out.

    With `is_tied` the head is the table of token embeddings.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, sequence: int, *, is_tied: bool = False):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(sequence, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(sequence), persistent=False)
        if is_tied:
            nn.init.normal_(self.token.weight, std=0.02)
            self.head.weight = self.token.weight

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


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times `width`, beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            _convolution(before, width, size=1),
            nn.ReLU(inplace=True),
            _convolution(width, width, stride),
            nn.ReLU(inplace=True),
            _convolution(width, after, size=1),
        )
        changes = stride != 1 or before != after
        self.shortcut = _convolution(before, after, stride, size=1) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """`[batch, 3, side, side]` float32 images in, `[batch, 1000]` float32 logits out."""

    def __init__(self, blocks: tuple[int, ...]):
        super().__init__()
        self.stem = nn.Sequential(_convolution(3, 64, 2, size=7), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        stages, before = [], 64
        for number, depth in enumerate(blocks):
            width = 64 * 2**number
            for block in range(depth):
                stages.append(Bottleneck(before, width, 2 if number and block == 0 else 1))
                before = 4 * width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, 1000)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


def _convolution(before: int, after: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))


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


def _loss_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
