"""Gradients under torch's distributed autograd (RPC), where they do not lie in `.grad`.

`dist_autograd.backward(context, ...)` may serve several contexts at once, so it leaves `.grad` alone and keeps a
parameter's gradient in the context. Everything else in minddp speaks of `.grad`. So while such a backward runs,
`.grad` shows the context's tensor from when it is packed; it is reduced in place, and at the end `.grad` gets back
what was there before. Torch's reducer knows both places instead (`runGradCallbackForVariable`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from minddp.core import autograd
from minddp.core.mode import Mode


class RpcGradients(Mode):
    """Shows the gradients of the context that the last forward was in, if the backward is one of that context."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]):
        self._params = params
        self._names = names
        self._context_id: int | None = None
        self._is_open = False
        self._before: dict[int, torch.Tensor | None] = {}
        self._shown: dict[int, torch.Tensor | None] = {}

    def armed(self) -> None:
        self._context_id = autograd.distributed_context()

    def opened(self, param: int) -> None:
        self._is_open = self._context_id is not None and self._params[param] in self._gradients()

    def before_pack(self, params: Sequence[int]) -> None:
        """Show what the backward has accumulated for these parameters, if anything."""
        if not self._is_open:
            return
        gradients = self._gradients()
        for param in params:
            self._before[param] = self._params[param].grad
            self._shown[param] = self._params[param].grad = gradients.get(self._params[param])

    def closed(self) -> None:
        """The averages are in `.grad`: see that the context has them, and restore what was there before.

        Raises:
            RuntimeError: a parameter that this rank has not used got an average from other ranks.
        """
        before, shown = self._before, self._shown
        self._before, self._shown, self._is_open = {}, {}, False
        without_home = []
        for param, grad in before.items():
            average = self._params[param].grad
            self._params[param].grad = grad
            tensor = shown[param]
            if tensor is None and average is not None:
                without_home.append(self._names[param])
            elif tensor is not None and average is not None and average is not tensor:
                tensor.copy_(average)
        if without_home:
            raise RuntimeError(
                f"Parameters that only other ranks have used: {', '.join(without_home)}. No gradient can be put "
                f"into a distributed autograd context from here; use every parameter on every rank."
            )

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        assert self._context_id is not None
        return torch.distributed.autograd.get_gradients(self._context_id)
