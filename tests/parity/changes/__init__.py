"""What the lines of a script do: `CHANGES[name](side, *args)` returns tensors to be compared, such as outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tests.parity.changes import backwards, gradients, outputs, routes, surroundings

if TYPE_CHECKING:
    from tests.parity.side import Side


def train(side: Side) -> list[torch.Tensor]:
    """An ordinary step."""
    return side.train()


CHANGES: dict[str, Callable[..., list[torch.Tensor]]] = {
    change.__name__: change
    for change in (
        train,
        *routes.CHANGES,
        *outputs.CHANGES,
        *backwards.CHANGES,
        *gradients.CHANGES,
        *surroundings.CHANGES,
    )
}
