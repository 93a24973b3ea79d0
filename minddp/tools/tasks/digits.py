"""Handwritten digits and a small ResNet: a complete task whose BatchNorm buffers DDP broadcasts."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from minddp.tools.train.settings import SettingsError
from minddp.tools.train.task import Task


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        first, second = (nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False) for _ in range(2))
        self.residual = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), second, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.residual(x)).relu()


def resnet(width: int, blocks: int) -> nn.Module:
    """(batch, 1, 8, 8) -> (batch, 10) logits."""
    stem = [nn.Conv2d(1, width, kernel_size=3, padding=1), *(Block(width) for _ in range(blocks))]
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10))


def task(width: int = 32, blocks: int = 2) -> Task:
    """Images (1, 8, 8), float32 in [0, 1], with their labels. Every fifth is validation data."""
    if importlib.util.find_spec("sklearn") is None:
        raise SettingsError(
            '--task digits needs scikit-learn, which is not installed. Run: pip install "minddp[digits]"'
        )
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 0
    training, validation = (TensorDataset(images[chosen], labels[chosen]) for chosen in (~held_out, held_out))
    return Task(training, validation, lambda: resnet(width, blocks))
