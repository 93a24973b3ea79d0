"""What is trained on a GPU to be timed: ResNet-50, a transformer of GPT-2 small's size, 2,000 small parameters.

The models of `benchmarks/workloads.py` are sized for two CPU cores: here they would be nothing but kernel launches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.workloads import Workload, orthogonal_chain

NAMES = ("many_small", "resnet50", "gpt2")


def gpu_workload(name: str, *, tiny: bool = False) -> Workload:
    """The workload called `name`; a `tiny` one has the same parts and takes no time."""
    return {"many_small": many_small, "resnet50": resnet50, "gpt2": gpt2}[name](tiny)


def many_small(tiny: bool) -> Workload:
    """1,000 linear layers of 64: 2,000 tensors, so that a step consists of kernel launches."""
    depth, width, batch_size = (8, 8, 4) if tiny else (1000, 64, 32)
    return Workload(
        name="many_small",
        title=f"{2 * depth:,} small parameters",
        model=lambda: orthogonal_chain(depth, width),
        batch=lambda rng: (
            torch.randn(batch_size, width, generator=rng),
            torch.randn(batch_size, width, generator=rng),
        ),
        loss=nn.functional.mse_loss,
        learning_rate=1e-4,
        steps_per_turn=4,
    )


def resnet50(tiny: bool) -> Workload:
    """ResNet-50 (He et al. 2015, with the stride in the 3x3 convolution) on images of 224 x 224."""
    side, batch_size, blocks = (32, 2, (1, 1, 1, 1)) if tiny else (224, 64, (3, 4, 6, 3))
    return Workload(
        name="resnet50",
        title=f"ResNet-50, {batch_size} images",
        model=lambda: ResNet(blocks),
        batch=lambda rng: (
            torch.randn(batch_size, 3, side, side, generator=rng),
            torch.randint(1000, (batch_size,), generator=rng),
        ),
        loss=nn.functional.cross_entropy,
        learning_rate=1e-3,
        steps_per_turn=3,
    )


def gpt2(tiny: bool) -> Workload:
    """124 million parameters as GPT-2 small has them (Radford et al. 2019), the head tied to the embedding."""
    layers, width, heads, vocabulary = (2, 32, 2, 64) if tiny else (12, 768, 12, 50_257)
    batch_size, sequence = (2, 16) if tiny else (8, 512)
    return Workload(
        name="gpt2",
        title=f"GPT-2 small, {batch_size} x {sequence} tokens",
        model=lambda: Transformer(vocabulary, width, layers, heads, sequence),
        batch=lambda rng: (
            torch.randint(vocabulary, (batch_size, sequence), generator=rng),
            torch.randint(vocabulary, (batch_size, sequence), generator=rng),
        ),
        loss=lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        learning_rate=1e-3,
        steps_per_turn=3,
    )


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times `width`, beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *_convolution(before, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, after, 1),
        )
        changes = stride != 1 or before != after
        self.shortcut = nn.Sequential(*_convolution(before, after, 1, stride)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """`[batch, 3, side, side]` float32 images in, `[batch, 1000]` float32 logits out."""

    def __init__(self, blocks: tuple[int, ...]):
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
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


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        per_head = self.attend(self.norm_1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = per_head
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.feed(self.norm_2(x))


class Transformer(nn.Module):
    """`[batch, sequence]` int64 tokens in, `[batch, sequence, vocabulary]` float32 logits out."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, sequence: int):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.token(tokens) + self.position(places))
        return nn.functional.linear(self.norm(hidden), self.token.weight)


def _convolution(before: int, after: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(after),
    )
