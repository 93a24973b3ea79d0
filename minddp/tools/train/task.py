"""A task: data to train on, data held out, an untrained model, and a loss."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from minddp.tools.train.settings import TASKS, Settings, SettingsError, arguments_for


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats per target. Logits (..., classes), targets (...)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long())


def top1_accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """The fraction of targets whose score is the highest."""
    return (logits.argmax(dim=-1) == targets).double().mean()


@dataclass(frozen=True)
class Task:
    """The return value of a function that `--task` names. It must be equal on every rank.

    A sample is a pair of tensors, inputs and targets. `loss(outputs, targets)` is a mean over the targets of a
    batch, and `accuracy`, which is only reported, is one, too.
    """

    training: Dataset[Any]
    validation: Dataset[Any]
    build_model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    accuracy: Callable[[Tensor, Tensor], Tensor] | None = top1_accuracy


def load_task(settings: Settings) -> Task:
    """Call the function that --task names, which reads the data.

    Raises:
        SettingsError: the function is not found, does not have these options, or has too little data.
    """
    place, _, name = TASKS.get(settings.task, settings.task).rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, str(Path(place).resolve().parent))  # as `python FILE.py` does
        place = Path(place).stem
    try:
        function = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise SettingsError(f"--task {settings.task} cannot be imported: {error}.") from error
    task: Task = function(**arguments_for(function, settings.task_options, "--task-options"))
    return task
