"""What a mean is, measured: the share of each micro-batch of each rank in the gradient, by `minddp.audit`.

`provenance.py` proves the same with symbols; here the gradients are those of a real training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import minddp

LABELS = 5
IGNORED = -100


def measured(rank: int, name: str, gradients: Callable[[nn.Module, list[tuple[Tensor, Tensor]]], None]) -> str:
    """The measured shares and the verdict, if `gradients` computes `.grad` from two micro-batches on each rank."""
    torch.manual_seed(0)
    model, dice = nn.Linear(16, LABELS), torch.Generator().manual_seed(rank)
    inputs = torch.randn(2, 8, 16, generator=dice)
    labels = torch.randint(0, LABELS, (2, 8), generator=dice)
    labels[:, 4 * (rank + 1) :] = IGNORED  # rank 0 has 4 tokens in each micro-batch, rank 1 has 8
    with minddp.audit(model) as audit:
        gradients(model, list(zip(inputs, labels, strict=True)))
        audit.before_update()
    if rank > 0:
        return ""
    (_, (_, *rows)), *_ = audit.report.tables()
    verdict = audit.report.verdicts()[0].text.partition(" (backward")[0].partition(", residual")[0]
    return "\n".join([name, *(f"  {'   '.join(row)}" for row in rows), f"  {verdict}."])


def average(model: nn.Module, divisor: int) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad)
        assert param.grad is not None
        param.grad /= divisor


def mean_of_means(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        (cross_entropy(model(x), y) / len(batches)).backward()
    average(model, dist.get_world_size())


def no_average(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        (cross_entropy(model(x), y) / len(batches)).backward()


def mean_over_tokens(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    tokens = torch.tensor([(y != IGNORED).sum() for _, y in batches]).sum()
    dist.all_reduce(tokens)
    for x, y in batches:
        (cross_entropy(model(x), y, reduction="sum") / tokens).backward()
    average(model, 1)


def shares(rank: int) -> str:
    """Three ways to compute a gradient: each micro-batch's measured share beside its expected share."""
    return "\n\n".join(
        measured(rank, name, gradients)
        for name, gradients in (
            ("each rank's own mean", no_average),
            ("the mean of the ranks' means", mean_of_means),
            ("the mean over all tokens", mean_over_tokens),
        )
    )
