"""A task: data to train on, data held out, an untrained model, and a loss."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from minddp.tools.train.settings import TASKS, Settings, SettingsError, arguments_for


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats per target. Logits (..., classes), targets (...)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def share_of_hits(logits: Tensor, targets: Tensor) -> Tensor:
    """Share of the targets with the highest score."""
    return (logits.argmax(dim=-1) == targets).double().mean()


@dataclass(frozen=True)
class Task:
    """What a function that `--task` names returns.

    A sample is a pair of tensors, inputs and targets. `loss(outputs, targets)` is a mean over a batch's targets;
    so is `accuracy`, which is only shown. The function is called on every rank and must return the same on each.
    """

    training: Dataset[Any]
    validation: Dataset[Any]
    build_model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    accuracy: Callable[[Tensor, Tensor], Tensor] | None = share_of_hits
    targets_are: str = "targets"  # in the plural, for reports: "bytes", "images"


def load_task(settings: Settings) -> Task:
    """The task that the settings name. Reads its data; deterministic, so every rank gets the same.

    Raises SettingsError for no such function, options it does not have, or data that is missing or too little.
    """
    place, _, name = TASKS.get(settings.task, settings.task).rpartition(":")
    try:
        function = getattr(_module(place), name)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise SettingsError(f"--task {settings.task} cannot be imported: {error}.") from error
    task = function(**arguments_for(function, settings.task_options, "--task-options"))
    if not isinstance(task, Task):
        raise SettingsError(
            f"--task {settings.task} must return a minddp.tools.train.task.Task, but returns {task!r}."
        )
    return task


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    loader = SourceFileLoader(Path(place).stem, place)
    module = sys.modules[loader.name] = ModuleType(loader.name)  # where workers that unpickle look for it
    module.__file__ = place
    loader.exec_module(module)
    return module
