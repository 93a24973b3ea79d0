"""The lines of a script: `CHANGES[name](side, *args)` may return tensors to be compared, such as outputs.

They are the public functions of the modules here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tests.parity.changes import backwards, gradients, outputs, routes, surroundings

if TYPE_CHECKING:
    from tests.parity.side import Side


def train(side: Side) -> list[torch.Tensor]:
    """An ordinary step."""
    return side.train()


CHANGES: dict[str, Callable[..., list[torch.Tensor] | None]] = {
    name: change
    for module in (routes, outputs, backwards, gradients, surroundings)
    for name, change in inspect.getmembers(module, inspect.isfunction)
    if change.__module__ == module.__name__ and not name.startswith("_")
} | {"train": train}
