"""The loss of a backward, read from its graph: its factor, and how many elements it is a mean of.

A script divides its loss by the number of micro-batches, multiplies it by that of ranks, or scales it for float16.
These factors reach every gradient. They are at the root of the graph: operations on scalars, down to the function
that reduces the losses of all elements (tokens). A sum is a mean times the number of elements. Of a sum of losses,
the first counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

REDUCTIONS = "none", "mean", "sum"  # by the number in torch's functions


@dataclass
class Loss:
    """A mean over `elements`, times `factor`; if not `is_mean`, a sum, or a function that is not known.

    A whole number, or a division by one, is taken for a part of averaging, and is in `whole_factor`, too; another
    factor, such as the 0.1 of a weighted term, may be a part of the loss.
    """

    factor: float = 1.0
    whole_factor: float = 1.0
    elements: float = 1
    is_mean: bool = False

    def multiply(self, by: float, *, divide: bool = False) -> None:
        if math.isfinite(by) and by:
            self.factor *= 1 / by if divide else by
            self.whole_factor *= (1 / by if divide else by) if by >= 2 and by == int(by) else 1.0


def read_loss(root: Any) -> Loss:
    loss = Loss()
    node, output = getattr(root, "grad_fn", None), getattr(root, "output_nr", 0)
    while node is not None and shape_of(node, output) == ():
        kind, *_ = node.name().lower().partition("backward")
        saved = [getattr(node, key, None) for key in ("_saved_other", "_saved_self")]
        numbers = [it for it in saved if isinstance(it, Tensor) and it.numel() == 1]
        if kind in ("div", "mul") and numbers:
            loss.multiply(float(numbers[0]), divide=kind == "div")
        below = [pair for pair in node.next_functions if pair[0] is not None]
        scalars = [pair for pair in below if shape_of(*pair) == ()]
        if not scalars:
            if kind in ("mean", "sum"):
                loss.elements = math.prod(shape_of(*below[0]))
            elif isinstance(target := getattr(node, "_saved_target", None), Tensor):
                kind = REDUCTIONS[getattr(node, "_saved_reduction", 0)]
                ignored = getattr(node, "_saved_ignore_index", None)
                loss.elements = target.numel() if ignored is None else int((target != ignored).sum())
            loss.is_mean = kind == "mean"
            loss.multiply(loss.elements if kind == "sum" else 1)
            break
        node, output = scalars[output if output < len(scalars) else 0]
    return loss


def shape_of(node: Any, output: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[output].shape) if output < len(node._input_metadata) else (-1,)
