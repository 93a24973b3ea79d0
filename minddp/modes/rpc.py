"""Gradients under torch's distributed autograd (RPC), which are not in `.grad`.

`dist_autograd.backward(context, ...)` keeps the gradients in the context, and all of minddp uses `.grad`. So during
such a backward `.grad` is set to the context's tensor when it is packed, and restored at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from minddp.core import autograd
from minddp.core.mode import Mode


class RpcGradients(Mode):
    """Shows the gradients in the context of the last forward, if the backward belongs to that context."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]):
        self._params = params
        self._names = names
        self._context_id: int | None = None
        self._is_open = False
        self._before: dict[int, torch.Tensor | None] = {}
        self._shown: dict[int, torch.Tensor | None] = {}

    def post_forward(self) -> None:
        self._context_id = autograd.distributed_context()

    def first_gradient(self, param: int) -> None:
        self._is_open = self._context_id is not None and self._params[param] in self._gradients()

    def before_pack(self, params: Sequence[int]) -> None:
        """Set `.grad` to the gradients in the context; `None` for a parameter without one."""
        if not self._is_open:
            return
        gradients = self._gradients()
        for param in params:
            self._before[param] = self._params[param].grad
            self._shown[param] = self._params[param].grad = gradients.get(self._params[param])

    def post_backward(self) -> None:
        """Move the averages in `.grad` to the context, and restore `.grad`.

        Raises:
            RuntimeError: a parameter has an average although this rank has not used it.
        """
        before, shown = self._before, self._shown
        self._before, self._shown, self._is_open = {}, {}, False
        not_used = []
        for param, grad in before.items():
            average = self._params[param].grad
            self._params[param].grad = grad
            tensor = shown[param]
            if tensor is None and average is not None:
                not_used.append(self._names[param])
            elif tensor is not None and average is not None and average is not tensor:
                tensor.copy_(average)
        if not_used:
            raise RuntimeError(
                f"Parameters that only other ranks have used: {', '.join(not_used)}. Their gradients cannot be "
                f"added to this rank's distributed autograd context. Use every parameter on every rank."
            )

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        assert self._context_id is not None
        return torch.distributed.autograd.get_gradients(self._context_id)
