r"""Rung 2, flat: pack all gradients into one buffer, average the buffer, copy the averages back.

    time ->
    compute        | bwd 3 | bwd 2 | bwd 1 | pack |                         | unpack | step |
    communication                                 | w1 b1 w2 b2 w3 b3, once |
                                           \______________ all of it exposed ______/

What it costs (P parameters, B bytes, latency a, bandwidth beta, as in `naive.py`):

    messages  1        bytes  B        exposed  a + B/beta, and two copies of B bytes through memory

Two copies in memory are far cheaper than P latencies. But the wire is idle during the whole of backward, and
the cores are idle during the whole of the message.

What the next rung improves: backward finishes the last layers' gradients first, long before the first
layers', so they could be on their way already (`overlapped.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .interface import DataParallel, gradient


class Flat(DataParallel):
    """One message a step."""

    def synchronize(self) -> None:
        self.require_every_gradient(
            arrived={name for name, param in self.trainable.items() if param.grad is not None}
        )
        params = list(self.trainable.values())
        buffer = pack(params)
        self.wire.average(buffer, label="everything").wait()
        unpack(buffer, params)


def pack(params: Sequence[nn.Parameter]) -> Tensor:
    """All gradients of `params`, end to end, in one new tensor of shape [total number of elements].

    `torch.cat` promotes mixed dtypes to the widest of them, so nothing is lost, though bytes are wasted.
    """
    return torch.cat([gradient(param).reshape(-1) for param in params])


def unpack(buffer: Tensor, params: Sequence[nn.Parameter]) -> None:
    """The reverse of `pack`: write each part of `buffer` over the gradient it came from."""
    parts = buffer.split([param.numel() for param in params])
    for param, part in zip(params, parts, strict=True):
        gradient(param).copy_(part.view(param.shape))
