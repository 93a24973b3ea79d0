"""Handwritten digits and a small conv net: the task with BatchNorm, whose buffers DDP broadcasts."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn
from torch.utils.data import TensorDataset

from minddp.train.settings import SettingsError

CLASSES = 10


def require_scikit_learn() -> None:
    """Raise SettingsError, with the command that helps, where scikit-learn is missing."""
    if importlib.util.find_spec("sklearn") is None:
        raise SettingsError(
            "--task digits reads its images from scikit-learn, which is not installed. "
            'Run: pip install "minddp[digits]"'
        )


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and validation samples (image (1, 8, 8) float32 in [0, 1], label); every fifth is held out."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 0
    training, validation = (TensorDataset(images[chosen], labels[chosen]) for chosen in (~held_out, held_out))
    return training, validation


class ConvNet(nn.Sequential):
    """Two convolutions with BatchNorm, then a linear classifier: (batch, 1, 8, 8) -> (batch, 10) logits."""

    def __init__(self, width: int = 32):
        super().__init__(
            nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, CLASSES),
        )
