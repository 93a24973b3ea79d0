"""The optimizer, and the learning rate of each step.

k ranks take one step where one rank takes k, on k times the samples. To move the weights as far, that step must be
k times as long (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1). Accumulation multiplies the
minibatch, too. The rule fails early in training, while weights change fast; a gradual warm-up bridges that phase
(section 2.2). The rule was found for SGD. With Adam it holds while k is small, and the square root of k fits better
(Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from minddp.tools.train.settings import Settings

OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.95)),
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}
# The fraction of the peak, as a function of the fraction of the run that is done.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda done: 1.0,
}


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Weight decay applies to matrices only, not to biases and scales."""
    parameters = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return OPTIMIZERS[settings.optimizer](groups, lr=settings.learning_rate)


def learning_rate(settings: Settings, num_ranks: int, step: int) -> float:
    """The learning rate of step `step` (from 0): warm-up times decay, scaled for ranks and accumulation."""
    warm_up = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    decay = SCHEDULES[settings.schedule](step / settings.steps)
    return warm_up * decay * settings.learning_rate * num_ranks * settings.accumulate
