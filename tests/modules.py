"""Small modules for tests of the reducer: orders of readiness, heads, reentrant checkpoints, a failing backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Explode(torch.autograd.Function):
    """The identity; its backward raises KeyError while `is_armed` says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_armed: list[bool]) -> torch.Tensor:
        ctx.is_armed = is_armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.is_armed[-1]:
            raise KeyError("exploded")
        return grad, None


class WithoutGradient(torch.autograd.Function):
    """The sum of x and a parameter. It returns no gradient for the parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        return x + param

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class Explosive(nn.Module):
    """`is_armed` is the state of the module: backward raises while its last element is True."""

    def __init__(self) -> None:
        super().__init__()
        self.is_armed = [False]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Explode.apply(x, self.is_armed)

    def arm(self, armed: bool = True) -> None:
        self.is_armed.append(armed)


class Scales(nn.Module):
    """Multiplies by scalars in an order of its own: gradients become ready from the last used to the first.

    `explosive` is applied after the scalar `explode_after`, so backward fails before that one's gradient.
    """

    def __init__(self, use_order: list[int], explode_after: int | None = None):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(float(i + 2))) for i in range(len(use_order))])
        self.use_order = use_order
        self.explosive = Explosive()
        self.explode_after = explode_after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.use_order:
            x = x * self.scales[index]
            if index == self.explode_after:
                x = self.explosive(x)
        return x


class Heads(nn.Module):
    """Two outputs with parameters of their own. With a trunk they share parameters, too."""

    def __init__(self, trunk: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.left = nn.Linear(2, 2)
        self.right = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if self.trunk is None else self.trunk(x)
        return self.left(x), self.right(x)


class Checkpointed(nn.Module):
    """The second of two layers is in a reentrant checkpoint: its hooks fire in a nested backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.explosive = Explosive()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, self.explosive(self.first(x)), use_reentrant=True)


class SharedByCheckpoints(nn.Module):
    """One layer in two reentrant checkpoints: its hooks fire twice, in nested backwards."""

    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) if self.first is not None else x.requires_grad_()
        x = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True)


class LendsALayer(nn.Module):
    """The loss applies a layer that forward does not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lent = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Hidden:
    """An output in which minddp finds no tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class HidesItsOutput(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.inner = module

    def forward(self, x: torch.Tensor) -> Hidden:
        return Hidden(self.inner(x))


def grads_by_name(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of the gradients; `None` where there is none."""
    return {name: p.grad if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
