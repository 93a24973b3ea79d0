"""Low precision, the loss scale that float16 needs, and clipping: from the loss to the optimizer's step.

[Note: precision]
`autocast` runs matrix products in 16 bits and keeps parameters, gradients and sums in 32. bfloat16 has the range of
float32. In float16 small gradients become zero: `GradScaler` multiplies the loss, and so all gradients, by a scale;
it divides before clipping, leaves a step out if a gradient has overflowed, and then takes a smaller scale. Averages
are equal on all ranks, so all leave out the same steps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from minddp.tools.train.settings import Settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """`--precision` and `--clip-norm`. See [Note: precision]."""

    def __init__(self, settings: Settings, device: torch.device):
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
        self._device = device
        self._dtype = DTYPES[settings.precision]
        self._clip_norm = settings.clip_norm

    def autocast(self) -> AbstractContextManager[None]:
        """For forward and loss; backward follows by itself."""
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> Tensor:
        """Clip the averaged gradients, by the same norm on every rank, and step. Returns the norm before."""
        self.scaler.unscale_(optimizer)
        limit = float("inf") if self._clip_norm is None else self._clip_norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        self.scaler.step(optimizer)
        self.scaler.update()
        return norm
