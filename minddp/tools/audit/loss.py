"""The loss of a backward, read from its graph: its factor, and how many elements it is a mean or a sum of.

A script divides its loss by the number of micro-batches, multiplies it by that of the ranks, or scales it for float16.
These factors reach every gradient, so a weight that is measured there means little without them. They stand at the
root of the graph: operations between scalars, down to the function that reduces the losses of all elements to one.

A factor that is a whole number, or a division by one, is taken for a part of the averaging. Any other, such as the 0.1
of a weighted term, may be a part of the loss. Of a sum of several losses, the first counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

MEAN, SUM = 1, 2  # of `_saved_reduction`, in torch's functions
MOST_NODES = 64


@dataclass
class Loss:
    """`elements` were reduced by `reduction`, None if it is not known, and multiplied by `factor`.

    `whole_factor` is the product of those factors that are whole numbers or divide by one.
    """

    factor: float = 1.0
    whole_factor: float = 1.0
    reduction: Literal["mean", "sum"] | None = None
    elements: int = 1
    counts_targets: bool = False

    def multiply(self, by: float, *, divide: bool = False) -> None:
        factor = 1 / by if divide and by else by
        self.factor *= factor
        if by >= 2 and by == int(by):
            self.whole_factor *= factor


def read_loss(root: Any, gradient: Any = None) -> Loss:
    """Read the graph below `root`; `gradient` is what backward was called with."""
    loss = Loss()
    if isinstance(gradient, Tensor) and gradient.numel() == 1:
        loss.multiply(float(gradient))
    node, output = getattr(root, "grad_fn", None), getattr(root, "output_nr", 0)
    for _ in range(MOST_NODES):
        if node is None or _shape(node, output) != ():
            break
        _read_factor(node, loss)
        below = [(node, output) for node, output in node.next_functions if node is not None]
        scalars = [(node, output) for node, output in below if _shape(node, output) == ()]
        if not scalars:
            _read_reduction(node, below, loss)
            break
        node, output = scalars[output] if output < len(scalars) else scalars[0]
    return loss


def _shape(node: Any, output: int) -> tuple[int, ...] | None:
    try:
        return tuple(node._input_metadata[output].shape)
    except (AttributeError, IndexError):
        return None


def _read_factor(node: Any, loss: Loss) -> None:
    name = node.name()
    others = [getattr(node, key, None) for key in ("_saved_other", "_saved_self")]
    scalars = [float(other) for other in others if isinstance(other, Tensor) and other.numel() == 1]
    if name.startswith("DivBackward") and scalars and isinstance(others[0], Tensor):
        loss.multiply(scalars[0], divide=True)
    elif name.startswith("MulBackward") and len(scalars) == 1:
        loss.multiply(scalars[0])


def _read_reduction(node: Any, below: list[tuple[Any, int]], loss: Loss) -> None:
    name, reduction = node.name(), getattr(node, "_saved_reduction", None)
    if name.startswith(("MeanBackward", "SumBackward")):
        loss.reduction = "mean" if name.startswith("Mean") else "sum"
        loss.elements = _terms(*below[0]) if below else 1
    elif reduction in (MEAN, SUM):
        loss.reduction = "mean" if reduction == MEAN else "sum"
        loss.elements = _targets(node) or 1
        loss.counts_targets = hasattr(node, "_saved_ignore_index")


def _targets(node: Any) -> int | None:
    """How many elements a loss function of torch compares; those with its ignored index are none."""
    target = getattr(node, "_saved_target", None)
    if not isinstance(target, Tensor):
        return None
    ignored = getattr(node, "_saved_ignore_index", None)
    return target.numel() if ignored is None else int((target != ignored).sum())


def _terms(node: Any, output: int) -> int:
    """How many terms a sum has; those that a mask or an ignored index makes zero are none."""
    shape = _shape(node, output)
    if node.name().startswith(("View", "Reshape", "UnsafeView", "ToCopy")) and node.next_functions[0][0]:
        return _terms(*node.next_functions[0])
    if node.name().startswith("Mul"):
        for key in ("_saved_other", "_saved_self"):
            mask = getattr(node, key, None)
            if isinstance(mask, Tensor) and mask.numel() > 1 and bool(((mask == 0) | (mask == 1)).all()):
                return int(mask.expand(shape).sum()) if shape else 1
    found = _targets(node) if getattr(node, "_saved_reduction", None) == 0 else None
    return torch.Size(shape or ()).numel() if found is None else found
