"""The models whose steps are timed, each the hard case of another part of DDP.

`many_small` is bookkeeping per parameter, `wide_mlp` is bytes moved, `transformer` is what people train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

WorkloadName = Literal["many_small", "transformer", "wide_mlp"]


@dataclass(frozen=True)
class Workload:
    """One model, the data it is fed, and how long a turn of it should be."""

    name: str
    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]  #: inputs, targets
    loss: Callable[[Tensor, Tensor], Tensor]
    learning_rate: float
    steps_per_turn: int  #: timed steps in a row; see [Note: paired rounds]


def many_small() -> Workload:
    """200 linear layers of 64: 400 tensors of at most 16 KiB, so each parameter's fixed costs dominate."""
    width, batch_size = 64, 16
    return Workload(
        name="many_small",
        title="200 linear layers of 64",
        model=lambda: orthogonal_chain(depth=200, width=width),
        batch=lambda rng: (_normal(rng, batch_size, width), _normal(rng, batch_size, width)),
        loss=nn.functional.mse_loss,
        learning_rate=1e-4,
        steps_per_turn=5,
    )


def transformer() -> Workload:
    """A causal byte-level transformer; compute and communication overlap."""
    sequence, batch_size, vocabulary = 64, 4, 256
    return Workload(
        name="transformer",
        title="transformer, 4 layers of 192, sequences of 64",
        model=lambda: ByteTransformer(vocabulary, width=192, layers=4, heads=6, sequence=sequence),
        batch=lambda rng: (
            torch.randint(vocabulary, (batch_size, sequence), generator=rng),
            torch.randint(vocabulary, (batch_size, sequence), generator=rng),
        ),
        loss=lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        learning_rate=1e-2,
        steps_per_turn=2,
    )


def wide_mlp() -> Workload:
    """4 linear layers of 2048 x 2048 and a small batch: 64 MiB of gradients, so moving bytes dominates."""
    width, batch_size = 2048, 8
    return Workload(
        name="wide_mlp",
        title="4 linear layers of 2048 x 2048",
        model=lambda: orthogonal_chain(depth=4, width=width),
        batch=lambda rng: (_normal(rng, batch_size, width), _normal(rng, batch_size, width)),
        loss=nn.functional.mse_loss,
        learning_rate=1e-4,
        steps_per_turn=1,
    )


def workload(name: WorkloadName) -> Workload:
    """The workload called `name`."""
    return {"many_small": many_small, "transformer": transformer, "wide_mlp": wide_mlp}[name]()


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
        places = torch.arange(tokens.shape[1])
        hidden = self.token(tokens) + self.position(places)
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def training_step(model: nn.Module, task: Workload, rank: int) -> Callable[[], None]:
    """One step of SGD on a batch of the rank's own: clear the gradients, forward, backward, update."""
    inputs, targets = task.batch(torch.Generator().manual_seed(1000 + rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=task.learning_rate)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        task.loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def _normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng)
