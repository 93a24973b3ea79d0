"""A small GPT over bytes, like GPT-2 (Radford et al. 2019), from torch's own layers: causal, pre-norm, GELU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from minddp.tools.tasks import corpus
from minddp.tools.train.settings import SettingsError
from minddp.tools.train.task import Task

VOCABULARY = 256  # every byte is a token, so no tokenizer is needed


def task(
    layers: int = 3,
    heads: int = 4,
    width: int = 128,
    context: int = 64,
    dropout: float = 0.0,
    corpus_mib: int = 16,
    folder: str = "",
    suffix: str = ".py",
) -> Task:
    """Predict the next byte of the text files below `folder` (default: Python's standard library).

    A sample has `context` bytes. At most `corpus_mib` MiB are read.
    """
    root = Path(folder).expanduser() if folder else corpus.STANDARD_LIBRARY
    texts = corpus.load_corpus(root, corpus_mib * 2**20, suffix)
    training, held_out = (corpus.ByteWindows(text, context) for text in texts)
    if len(held_out) == 0:
        raise SettingsError(
            f"--task-options: context={context} is longer than the held-out text of {len(held_out.text):,} bytes; "
            f"lower it or raise corpus_mib."
        )
    return Task(training, held_out, lambda: GPT(layers, heads, width, context, dropout), targets_are="bytes")


class GPT(nn.Module):
    def __init__(self, layers: int = 3, heads: int = 4, width: int = 128, context: int = 64, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(context, width) / width**0.5)
        block = partial(nn.TransformerEncoderLayer, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block(width, heads, 4 * width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.zeros_(self.head.weight)  # the first prediction is uniform: ln 256 = 5.55 nats

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64 -> (batch, time, 256) logits; `time` is at most `context`."""
        time = tokens.shape[1]
        # Not a buffer, because DDP broadcasts every buffer before a forward.
        later = nn.Transformer.generate_square_subsequent_mask(time, tokens.device)
        stream = self.embedding(tokens) + self.positions[:time]
        for block in self.blocks:
            stream = block(stream, later, is_causal=True)
        return self.head(self.norm(stream))
