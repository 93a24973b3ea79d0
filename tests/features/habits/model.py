"""The model that habits train, and what they have in common.

The model has gradients large enough to be aliased, and others that are too small ([Note: gradient aliasing]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tests.features.beside import Snapshot, Steps, random, snapshot

WIDTH = 128  # a weight of 128 x 128 floats is just large enough to be aliased
STEPS = 6
CALM_STEPS = 3  # before something changes: one per plan, and one more


def layers() -> nn.Sequential:
    """Two layers with large weights and one with a small one. All begin where a fresh allocation could."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 16)
    )


def loss_of(ddp: Any, rank: int, step: int) -> torch.Tensor:
    return ddp(random(4, WIDTH, rank=rank, step=step)).square().sum()


def losses(ddp: Any, rank: int) -> Iterator[tuple[int, torch.Tensor]]:
    """`(step, loss)` of each step, which begins without gradients."""
    for step in range(STEPS):
        ddp.zero_grad()
        yield step, loss_of(ddp, rank, step)


def trained(ddp: Any, rank: int) -> Steps:
    """Ordinary steps."""
    for _step, loss in losses(ddp, rank):
        loss.backward()
        yield snapshot(ddp)


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


def hook_all(ddp: nn.Module, hook: Callable[[Any], object]) -> None:
    for param in ddp.parameters():
        param.register_post_accumulate_grad_hook(hook)


def numbered(tensors: Sequence[torch.Tensor]) -> Snapshot:
    return {str(number): tensor.detach().clone() for number, tensor in enumerate(tensors)}


def narrow() -> nn.Sequential:
    """Twenty layers, none of them large, together more than one run holds ([Note: packing in runs])."""
    return nn.Sequential(*(nn.Linear(WIDTH, 64) if index % 2 == 0 else nn.Linear(64, WIDTH) for index in range(20)))
