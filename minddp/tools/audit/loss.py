"""The loss of a backward, read from its graph: its factor, and how many elements it is a mean of.

A script divides its loss by the number of micro-batches, multiplies it by that of ranks, or scales it for float16.
These factors reach every gradient. They are at the root of the graph: operations on scalars, down to the function
that reduces the losses of all elements (tokens). A sum is a mean times the number of elements. Of a sum of losses,
the first counts. Padding is left out: labels with the ignore index, and elements that a mask of 0 and 1 multiplies
by 0. With weights of classes, an element counts as its class does.
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

    def multiply(self, by: float, *, divide: bool = False, whole: bool = False) -> None:
        if math.isfinite(by) and by:
            self.factor *= 1 / by if divide else by
            self.whole_factor *= (1 / by if divide else by) if whole or (by >= 2 and by == int(by)) else 1.0


def read_loss(root: Any) -> Loss:
    loss = Loss()
    node, output = getattr(root, "grad_fn", None), getattr(root, "output_nr", 0)
    while node is not None and shape_of(node, output) == ():
        kind = kind_of(node)
        if kind in ("div", "mul") and (numbers := [it for it in operands(node) if it.numel() == 1]):
            loss.multiply(float(numbers[0]), divide=kind == "div")
        below = [pair for pair in node.next_functions if pair[0] is not None]
        scalars = [pair for pair in below if shape_of(*pair) == ()]
        if not scalars:
            size = 1.0
            if kind in ("mean", "sum"):
                size, loss.elements = math.prod(shape_of(*below[0])), unmasked(*below[0])
            elif isinstance(target := getattr(node, "_saved_target", None), Tensor):
                kind = REDUCTIONS[getattr(node, "_saved_reduction", 0)]
                size = loss.elements = float(getattr(node, "_saved_total_weight", 0)) or target.numel()
            loss.is_mean = kind == "mean" and loss.elements == size
            if kind in ("mean", "sum"):  # a mean of which some elements are padding is a sum, divided by all
                loss.multiply(loss.elements / (size if kind == "mean" else 1), whole=True)
            break
        node, output = scalars[output if output < len(scalars) else 0]
    return loss


def unmasked(node: Any, output: int) -> float:
    """How many of the elements of this output of `node` count."""
    size = math.prod(shape_of(node, output))
    while node is not None and math.prod(shape_of(node, output)) == size:
        target, ignored = getattr(node, "_saved_target", None), getattr(node, "_saved_ignore_index", None)
        if target is not None and ignored is not None:
            return int((target != ignored).sum())
        for mask in operands(node) if kind_of(node) == "mul" else ():
            if not mask.requires_grad and bool(((mask == 0) | (mask == 1)).all()):
                return float(mask.sum()) * size / mask.numel()
        node, output = next((pair for pair in node.next_functions if pair[0] is not None), (None, 0))
    return size


def kind_of(node: Any) -> str:
    return node.name().lower().partition("backward")[0]


def operands(node: Any) -> list[Tensor]:
    saved = [getattr(node, key, None) for key in ("_saved_other", "_saved_self")]
    return [it for it in saved if isinstance(it, Tensor)]


def shape_of(node: Any, output: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[output].shape) if output < len(node._input_metadata) else (-1,)
