"""The divisor of the sum over the ranks.

Usually it is the number of ranks. Under `join` with divide_by_initial_world_size=False it is the number of ranks
that had inputs when the forward began. With weights, rank r's gradients are multiplied by `weight[r] /
sum(weights)`: the mean over all samples, if ranks have batches of different sizes.

To read the sum of the weights from a GPU, the host waits for a copy, and for all earlier work on the copy's stream:
on the current stream, for a whole forward. So the weights use a side stream with no other work. Without weights and
`join` nothing is read; under `join` the host waits before each forward anyway, to read the kind of the step.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch

from minddp.core.mode import Mode
from minddp.platform import streams
from minddp.transport.protocols import Transport, Work

_WEIGHED = "`weigh` applied to that one. Compute one loss from all outputs, or call `weigh` before each backward"


class Divisor(Mode):
    """`for_this_backward()` is the divisor of this rank's gradients, applied before the sum."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._active: torch.futures.Future[list[torch.Tensor]] | None = None
        self._weights: tuple[Work, torch.Tensor, float] | None = None  # in flight: the sum; this rank's weight
        self._forwards = 0  # since `weigh`
        self._side_stream: torch.Stream | None = None

    def change_ranks(self, transport: Transport) -> None:
        """Continue with other ranks."""
        self._transport, self._active, self._weights = transport, None, None

    def divide_by_active_ranks(self, count: torch.futures.Future[list[torch.Tensor]] | None) -> None:
        """Divide the next backward by the number of active ranks, the only element of `count`, if given."""
        self._active = count

    def weigh(self, weight: float, device: torch.device) -> None:
        """Weight this rank's gradients in the next backward. Collective.

        Raises:
            ValueError: the weight is negative or not finite.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"`weigh` takes a finite number, 0 or more, but got {weight!r}.")
        with self._on_side_stream(device):
            total = torch.tensor([weight], dtype=torch.float64, device=device)
            self._weights = (self._transport.all_reduce(total), total, weight)
        self._forwards = 0
        self.cannot_add = ""

    def post_forward(self) -> None:
        self._forwards += 1

    def for_this_backward(self) -> float:
        """The divisor of the backward that begins now. To be called once in each backward.

        Raises:
            RuntimeError: all weights are zero, or `weigh` was called before an earlier forward.
        """
        active, self._active = self._active, None
        weights, self._weights = self._weights, None
        self.cannot_add = _WEIGHED if weights is not None else ""
        if weights is not None:
            if self._forwards > 1:
                raise RuntimeError(
                    "`weigh` was called before an earlier forward, so this backward has no weight. Call `weigh` "
                    "on every rank after the last forward whose output is in the loss, and evaluate under "
                    "torch.no_grad()."
                )
            work, sum_on_device, weight = weights
            with self._on_side_stream(sum_on_device.device):
                work.wait()
                total = sum_on_device.item()
            if total == 0:
                raise RuntimeError(
                    "All ranks have the weight 0, so the gradients have no mean. Give at least one rank a weight."
                )
            return total / weight if weight else math.inf
        if active is not None:
            [count] = active.wait()
            return int(count.item())
        return self._transport.world_size

    def _on_side_stream(self, device: torch.device) -> AbstractContextManager[object]:
        """The module's docstring says why."""
        if not streams.has_streams(device):
            return nullcontext()
        module = torch.get_device_module(device)
        if self._side_stream is None:
            self._side_stream = module.Stream(device)
        return module.stream(self._side_stream)
