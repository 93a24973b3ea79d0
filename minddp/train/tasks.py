"""A task: data to train on, data held out, and an untrained model.

Every task is a classification of some kind of thing: the GPT sorts each context into the 256 bytes that may
come next, the conv net sorts images into ten digits. So one loss, one accuracy and one loop serve all tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from minddp.train import corpus, digits
from minddp.train.gpt import GPT
from minddp.train.settings import Settings, SettingsError

MIB = 1024 * 1024


@dataclass(frozen=True)
class Task:
    """Data and model; a sample is (inputs, targets)."""

    targets_are: str  # in the plural, for reports: "bytes", "images"
    training: Dataset[Any]
    validation: Dataset[Any]
    build_model: Callable[[], nn.Module]


def load_task(settings: Settings) -> Task:
    """The task that the settings name. Reads its data; deterministic, so every rank gets the same.

    Raises:
        SettingsError: data is missing, or too little for these settings.
    """
    if settings.task == "digits":
        digits.require_scikit_learn()
        training, validation = digits.load_digits()
        return Task("images", training, validation, digits.ConvNet)
    texts = corpus.load_corpus(corpus.standard_library(), settings.gpt.corpus_mib * MIB)
    read, held_out = (corpus.ByteWindows(text, settings.gpt.context) for text in texts)
    if len(held_out) == 0:
        raise SettingsError(
            f"--context {settings.gpt.context} is longer than the held-out text of {len(held_out.text):,} bytes; "
            f"lower it or raise --corpus-mib."
        )
    return Task("bytes", read, held_out, lambda: GPT(settings.gpt))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats per target. Logits (..., classes), targets (...)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
