"""Gradients under torch's distributed autograd (RPC), where they do not lie in `.grad`.

`dist_autograd.backward(context, ...)` may serve several contexts at once, so it leaves `.grad` alone and keeps a
parameter's gradient in the context. Everything else in minddp speaks of `.grad`. So while such a backward runs,
its gradients are *lent*: `.grad` shows the context's tensor, is reduced in place, and at the end gets back what
was there before. Torch's reducer knows both places instead (`runGradCallbackForVariable`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import nn


def context_of_forward() -> int | None:
    """The distributed autograd context that the calling thread is in, if any."""
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is None or not rpc.is_available() or not rpc.api._is_current_rpc_agent_set():
        return None
    try:
        return torch._C._distributed_autograd._current_context()._context_id()
    except RuntimeError:
        return None  # outside of any context


class LentGradients:
    """The gradients of context `context_id`, shown as `.grad` of `params` from when they are packed."""

    def __init__(self, context_id: int, params: Sequence[nn.Parameter], names: Sequence[str]):
        self._context_id = context_id
        self._params = params
        self._names = names
        self._before: dict[int, torch.Tensor | None] = {}
        self._lent: dict[int, torch.Tensor | None] = {}

    def has(self, param: int) -> bool:
        """Whether the context holds a gradient for this parameter: else the backward is an ordinary one."""
        return self._params[param] in self._gradients()

    def lend(self, params: Iterable[int]) -> None:
        """The backward is done with these parameters: show what it has accumulated for them, if anything."""
        gradients = self._gradients()
        for param in params:
            self._before[param] = self._params[param].grad
            self._lent[param] = self._params[param].grad = gradients.get(self._params[param])

    def give_back(self) -> None:
        """The averages are in `.grad`: see that the context has them, and restore what was there before.

        Raises:
            RuntimeError: a parameter that this rank has not used got an average from other ranks.
        """
        homeless = []
        for param, before in self._before.items():
            average, lent = self._params[param].grad, self._lent[param]
            self._params[param].grad = before
            if lent is None and average is not None:
                homeless.append(self._names[param])
            elif lent is not None and average is not None and average is not lent:
                lent.copy_(average)
        if homeless:
            raise RuntimeError(
                f"Parameters that only other ranks have used: {', '.join(homeless)}. Into a distributed autograd "
                f"context no gradient can be put from here; use every parameter on every rank."
            )

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        return torch.distributed.autograd.get_gradients(self._context_id)
