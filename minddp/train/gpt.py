"""A small GPT over bytes: a decoder-only transformer that fits on two screens.

Pre-norm blocks as in GPT-2 (Radford et al. 2019), with three later changes that make a small model learn
faster: rotary positions (Su et al. 2021) instead of a learned table, RMSNorm (Zhang and Sennrich 2019)
without weights, and squared ReLU (So et al. 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minddp.train.settings import GPTOptions

VOCABULARY = 256  # every byte is a token: there is no tokenizer to train or to download
LONGEST_WAVE = 1000.0  # of the rotary positions, in units of 2 pi bytes; well above the context lengths used here


class GPT(nn.Module):
    """Bytes in; at each position a score for every possible next byte out."""

    def __init__(self, options: GPTOptions):
        super().__init__()
        self.head_width = options.width // options.heads
        self.embedding = nn.Embedding(VOCABULARY, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        nn.init.zeros_(self.head.weight)  # the first prediction is uniform: ln 256 = 5.55 nats

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64 -> (batch, time, 256) logits."""
        # Computed, not kept as a buffer: DDP broadcasts every buffer before a forward.
        turns = rotations(tokens.shape[1], self.head_width, tokens.device)
        stream = normalize(self.embedding(tokens))
        for block in self.blocks:
            stream = block(stream, turns)
        return self.head(normalize(stream))


class Block(nn.Module):
    """Attention to earlier positions, then a two-layer network; both are added to the residual stream."""

    def __init__(self, options: GPTOptions):
        super().__init__()
        self.attention = Attention(options)
        self.expand = nn.Linear(options.width, 4 * options.width, bias=False)
        self.contract = nn.Linear(4 * options.width, options.width, bias=False)
        self.dropout = nn.Dropout(options.dropout)
        nn.init.zeros_(self.contract.weight)  # a new block adds nothing, whatever the depth

    def forward(self, stream: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """(batch, time, width) -> (batch, time, width)."""
        stream = stream + self.dropout(self.attention(normalize(stream), turns))
        hidden = F.relu(self.expand(normalize(stream))).square()
        return stream + self.dropout(self.contract(hidden))


class Attention(nn.Module):
    """Causal self-attention: each position takes a weighted mean over itself and the positions before it."""

    def __init__(self, options: GPTOptions):
        super().__init__()
        self.heads = options.heads
        self.dropout = options.dropout
        self.qkv = nn.Linear(options.width, 3 * options.width, bias=False)
        self.out = nn.Linear(options.width, options.width, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """(batch, time, width) -> (batch, time, width)."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        q, k = rotate(normalize(q), turns), rotate(normalize(k), turns)
        dropout = self.dropout if self.training else 0.0
        heard = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(heard.transpose(1, 2).reshape(batch, time, width))


def normalize(x: Tensor) -> Tensor:
    """Scale the last dimension to a root mean square of 1."""
    return F.rms_norm(x, (x.shape[-1],))


def rotations(time: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, each (time, head_width / 2)."""
    half = head_width // 2
    frequencies = LONGEST_WAVE ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(time, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel pairs by their position's angle: q . k then depends on the distance of two positions."""
    cos, sin = turns
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


@torch.no_grad()
def continue_text(model: GPT, prompt: bytes, length: int, context: int, temperature: float, seed: int) -> bytes:
    """`prompt` and `length` more bytes, drawn from the model's predictions; a low temperature draws likely ones."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    model.eval()
    for _ in range(length):
        logits = model(torch.tensor([text[-context:]]))[0, -1]
        probabilities = F.softmax(logits / temperature, dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text)
