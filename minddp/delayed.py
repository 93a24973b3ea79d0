"""Parameters whose all-reduce waits for a sign: delay_all_reduce_named_params, param_to_hook_all_reduce.

For gradients that arrive in an awkward order, such as large embeddings, the caller names one parameter, and when
*its* gradient arrives the others' leave, in one all-reduce of one buffer. Their `.grad`s are views of that buffer
all the time, so there is nothing to pack; bucket options do not apply to them. As torch, the buffer is truly
divided by the world size, and float32 whatever the parameters are. Unlike torch, the end of backward waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from minddp import autograd, replicas
from minddp.transport import Transport, Work


class DelayedAllReduce:
    """One flat buffer for the gradients of `params`, reduced when the gradient of `trigger` arrives."""

    def __init__(self, params: Sequence[nn.Parameter], trigger: nn.Parameter, transport: Transport):
        self._params = list(params)
        self._transport = transport
        self._buffer = torch.zeros(sum(param.numel() for param in params), device=params[0].device)
        self._views = [
            piece.view(param.shape)
            for piece, param in zip(
                self._buffer.split([param.numel() for param in params]), self._params, strict=True
            )
        ]
        with torch.no_grad():
            replicas.broadcast_coalesced(transport, [param.detach() for param in self._params])
        self._handle = trigger.register_hook(self._on_trigger)

    def provide_grads(self) -> None:
        """After each forward: parameters whose `.grad` was dropped get a view of zeros."""
        missing = [param for param in self._params if param.grad is None]
        if len(missing) == len(self._params):
            self._buffer.zero_()
        for param, view in zip(self._params, self._views, strict=True):
            if param.grad is None:
                param.grad = view if len(missing) == len(self._params) else view.zero_()

    def _on_trigger(self, grad: torch.Tensor) -> torch.Tensor:
        self._buffer.div_(self._transport.world_size)
        work: Work = self._transport.all_reduce(self._buffer)
        autograd.call_at_end_of_backward(work.wait)
        return grad
