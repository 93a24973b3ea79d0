"""A task whose model has BatchNorm: two noisy classes, 400 samples to train on and 40 held out."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from minddp.tools.train.task import Task

NAME = f"{__name__}:task"


def task(width: int = 8) -> Task:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(440) % 2
    inputs = torch.randn(440, 4, generator=generator) + 3 * labels[:, None]
    training, held_out = (TensorDataset(inputs[part], labels[part]) for part in (slice(400), slice(400, None)))
    return Task(training, held_out, lambda: model(width))


def model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
