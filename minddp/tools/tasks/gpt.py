"""A small GPT over bytes, like GPT-2 (Radford et al. 2019), from torch's own layers: causal, pre-norm, GELU.

Its text is in a folder, or is the source code of Python's standard library, which every machine has.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from minddp.tools.train.settings import SettingsError
from minddp.tools.train.task import Task

VOCABULARY = 256  # every byte is a token, so no tokenizer is needed
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
# These are not the library's own code: packages installed beside it, its tests, and generated tables.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def task(
    layers: int = 3,
    heads: int = 4,
    width: int = 128,
    context: int = 64,
    dropout: float = 0.0,
    corpus_mib: int = 16,
    folder: str = STANDARD_LIBRARY,
    suffix: str = ".py",
) -> Task:
    """Predict the next byte of the text files below `folder` (default: Python's standard library).

    A sample has `context` bytes. At most `corpus_mib` MiB are read.
    """
    texts = load_corpus(Path(folder).expanduser(), corpus_mib * 2**20, suffix)
    if min(map(len, texts)) <= context:
        raise SettingsError(
            f"--task-options: context={context} is longer than the text; lower it or raise corpus_mib."
        )
    training, held_out = (windows(text, context) for text in texts)
    return Task(training, held_out, lambda: GPT(layers, heads, width, context, dropout))


def load_corpus(root: Path, limit_bytes: int, suffix: str = ".py") -> tuple[Tensor, Tensor]:
    """Training text of at most `limit_bytes` bytes, and validation text of at most a tenth of that: (n,) uint8.

    The files are sorted, so every rank gets the same text. Validation text consists of whole files, one in ten,
    since passages of one file resemble each other.

    Raises:
        SettingsError: there are not enough files below `root` for both.
    """
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]  # os.walk descends into these
        paths += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(suffix)]
    training, held_out = bytearray(), bytearray()
    for path in sorted(paths):
        is_held_out = zlib.crc32(path.encode()) % 10 == 0
        text, limit = (held_out, limit_bytes // 10) if is_held_out else (training, limit_bytes)
        if len(text) < limit:
            text += ((root / path).read_bytes() + b"\0")[: limit - len(text)]  # source code never contains a zero
    if not training or not held_out:
        raise SettingsError(
            f"{root} contains {len(paths)} files that end in `{suffix}`, too few for training and validation. Pass "
            f"a folder with more: --task-options folder=PATH suffix=.txt"
        )
    return torch.frombuffer(training, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def windows(text: Tensor, context: int) -> TensorDataset:
    """The text in pieces of `context` bytes; a sample is (piece, the same piece one byte later), uint8."""
    pieces = text.unfold(0, context + 1, context)
    return TensorDataset(pieces[:, :-1], pieces[:, 1:])


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
        """(batch, time) uint8 -> (batch, time, 256) logits; `time` is at most `context`."""
        time = tokens.shape[1]
        # Not a buffer, because DDP broadcasts every buffer before a forward.
        later = nn.Transformer.generate_square_subsequent_mask(time, tokens.device)
        stream = self.embedding(tokens.int()) + self.positions[:time]
        for block in self.blocks:
            stream = block(stream, later, is_causal=True)
        return self.head(self.norm(stream))
