"""The learning rate as a pure function of where the run is.

[Note: linear scaling]
k ranks take one step where one rank takes k, on k times the samples. To travel as far, that step has to be k
times as long: where the minibatch is multiplied by k, multiply the learning rate by k (Goyal et al. 2017,
"Accurate, Large Minibatch SGD", section 2.1). Accumulation multiplies the minibatch too, so two ranks, and
one rank that accumulates twice, take the same steps. The rule fails early in training, while the weights
change fast; a gradual warm-up bridges that phase (section 2.2). It was found for SGD; with Adam it holds
while k is small.
"""

from __future__ import annotations

import math

from minddp.train.settings import Settings


def peak_learning_rate(settings: Settings, world_size: int) -> float:
    """The learning rate after warm-up, scaled to the global batch. See [Note: linear scaling]."""
    return settings.learning_rate * world_size * settings.accumulate


def learning_rate(settings: Settings, world_size: int, step: int, progress: float) -> float:
    """Of optimizer step `step` (the first is 0), when `progress` in [0, 1] of the run is done.

    Linear warm-up times cosine decay (Loshchilov and Hutter 2017) from the peak to `final_fraction` of it.
    """
    warmup = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    decay = settings.final_fraction + (1 - settings.final_fraction) * cosine
    return peak_learning_rate(settings, world_size) * warmup * decay


def progress(settings: Settings, step: int, elapsed_s: float) -> float:
    """How much of the run is done, in [0, 1], by the limit that is nearer.

    Without a time limit the clock has no influence, so runs can be repeated to the bit.
    """
    return min(1.0, max(step / settings.limit_steps, elapsed_s / settings.limit_s))
