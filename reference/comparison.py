"""Is a gradient the mean over the ranks? One that differs is compared with what well-known mistakes make of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import oracle


class Fault(NamedTuple):
    """`trap` is a key of `grade.TRAPS`; `text` says what was expected and found."""

    trap: str
    text: str


def mean_of(of_rank: list[oracle.Gradients]) -> oracle.Gradients:
    return {name: oracle.mean([grads[name] for grads in of_rank]) for name in of_rank[0]}


def total(*grads: oracle.Gradients) -> oracle.Gradients:
    return {name: torch.stack([each[name] for each in grads]).sum(0) for name in grads[0]}


def compare(
    module: nn.Module,
    of_rank: list[oracle.Gradients],
    mistakes: Mapping[str, oracle.Gradients] | None = None,
    parts: Mapping[str, oracle.Gradients] | None = None,
) -> Fault | None:
    """The first gradient of `module` that is not the mean of `of_rank`: which of the `mistakes` made it?

    `parts`, by default those of the ranks, are the gradients by which the text says what it is instead.
    """
    rank, n, expected = dist.get_rank(), len(of_rank), mean_of(of_rank)
    found = {name: param.grad for name, param in module.named_parameters()}
    usual = {"local": of_rank[rank], "rank 0's": of_rank[0]} | dict(mistakes or {})
    for name in found.keys() - expected.keys():
        if found[name] is not None:
            return Fault("frozen", f"`{name}` on rank {rank} is frozen and has a gradient.")
    wrong = [name for name in expected if differs(found[name], expected[name])]
    if not wrong:
        return None
    name, mean, grad = wrong[0], expected[wrong[0]], found[wrong[0]]
    if grad is None:
        return Fault("none", f"`{name}` has no gradient on rank {rank}.")
    trap = next((trap for trap, grads in usual.items() if not differs(grad, grads[name])), None)
    ratio = float((grad * mean).sum() / mean.square().sum())
    if trap is None and not differs(grad, ratio * mean):
        trap = "summed" if abs(ratio - n) < 1e-6 else "divided twice" if abs(ratio * n - 1) < 1e-6 else "scaled"
    if trap is None and float((grad - mean).abs().max()) < 0.02 * float(mean.abs().max()):
        trap = "rounded"
    if trap == "local" and len(wrong) < len(expected):
        trap = "forgotten"
    values = f"expected {first(mean)}, found {first(grad)}"
    parts = parts or {f"rank {number}'s gradient": grads for number, grads in enumerate(of_rank)}
    instead = measured(grad, {part: grads[name] for part, grads in parts.items()})
    return Fault(trap or "other", f"`{name}` on rank {rank} of {n}: {values} (the first element). {instead}")


def measured(grad: Tensor, parts: Mapping[str, Tensor]) -> str:
    """By least squares: how much of each part is in `grad`. `minddp audit` measures it in any training script."""
    columns = torch.stack([part.reshape(-1) for part in parts.values()], 1)
    if torch.linalg.matrix_rank(columns) < len(parts):
        return "How much each part counts cannot be told, since their gradients depend on each other."
    weights = torch.linalg.lstsq(columns, grad.reshape(-1, 1)).solution[:, 0]
    rest = float((grad.reshape(-1) - columns @ weights).norm() / grad.norm()) if grad.any() else 0.0
    terms = [
        f"{weight:.3g} x {part}"
        for weight, part in zip((weights.round(decimals=6) + 0.0).tolist(), parts, strict=True)
    ]
    others = f"; {rest:.0%} of it is something else" if rest > 0.005 else ""
    return f"Measured, it is {' + '.join(terms)}{others}."


def differs(found: Tensor | None, expected: Tensor) -> bool:
    """By more than rounding; NaN differs."""
    rounding = 1e-12 if expected.dtype == torch.float64 else 1e-6
    return found is None or not float((found - expected).abs().max()) <= rounding * (
        1 + float(expected.abs().max())
    )


def first(tensor: Tensor) -> str:
    return f"{tensor.reshape(-1)[0].item():.6g}"
