"""The divisor of the sum over the ranks: what kind of mean the gradients become.

As a rule by the number of ranks. Under `join` with divide_by_initial_world_size=False, by the number of ranks
that still had inputs when this forward began. With reduction="sum", by nothing. With weights, rank r's
gradients count `weight[r] / sum(weights)`: the mean over all samples where ranks have batches of different sizes.

[Note: read aside]
A number on a GPU is read by a copy that the host waits for, and with it for all that the stream of the copy has
been asked for before: on the stream that is current, a whole forward. So the weights travel on a stream of their
own, where nothing is before them. In a step without weights and without `join` nothing is read; under `join` the
host reads the kind of the step before each forward anyway.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch

from minddp.core.mode import Mode
from minddp.platform import streams
from minddp.transport.protocols import Transport, Work

_SUMMED = 'with reduction="sum" it would be summed again. Compute one loss from all outputs'
_WEIGHED = "`weigh` was for that one. Compute one loss from all outputs, or call `weigh` before each backward"


class Divisor(Mode):
    """`for_this_backward()` is what each rank divides its gradients by, before they are summed."""

    def __init__(self, transport: Transport, reduction: object):
        self._transport = transport
        self._reduction = reduction
        self._active: torch.futures.Future[list[torch.Tensor]] | None = None
        self._weights: tuple[Work, torch.Tensor, float] | None = None
        self._forwards = 0  # since the weights were given
        self._side_stream: torch.Stream | None = None

    def change_ranks(self, transport: Transport) -> None:
        """Go on with other ranks."""
        self._transport, self._active, self._weights = transport, None, None

    def divide_by_active_ranks(self, count: torch.futures.Future[list[torch.Tensor]] | None) -> None:
        """The next backward divides by the number of ranks that are active, one element in `count`, if given."""
        self._active = count

    def weigh(self, weight: float, device: torch.device) -> None:
        """The next backward takes this rank's gradients `weight` times. Collective: every rank calls it.

        Raises:
            ValueError: a weight that is negative or not finite, or gradients that are to be summed.
        """
        if self._reduction != "mean":
            raise ValueError(f'Weights are for `reduction="mean"`, but here it is reduction={self._reduction!r}.')
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"A rank's weight is a finite number, 0 or more, but got {weight!r}.")
        with self._aside(device):
            total = torch.tensor([weight], dtype=torch.float64, device=device)
            self._weights = (self._transport.all_reduce(total), total, weight)
        self._forwards = 0
        self.cannot_add = ""

    def armed(self) -> None:
        self._forwards += 1

    def for_this_backward(self) -> float | None:
        """The divisor of the backward that begins now, and of no other; `None` where the sum itself is wanted.

        Raises:
            RuntimeError: all weights are zero, or `weigh` was called before an earlier forward.
        """
        active, self._active = self._active, None
        weights, self._weights = self._weights, None
        self.cannot_add = _WEIGHED if weights is not None else _SUMMED if self._reduction == "sum" else ""
        if weights is not None:
            if self._forwards > 1:
                raise RuntimeError(
                    "`weigh` was called before an earlier forward, and this backward has no weight of its own. "
                    "Call `weigh` after the last forward whose output is in the loss, on every rank, and evaluate "
                    "under torch.no_grad()."
                )
            work, sum_on_device, weight = weights
            with self._aside(sum_on_device.device):
                work.wait()
                total = sum_on_device.item()
            if total == 0:
                raise RuntimeError("Every rank has given its gradients the weight 0, so they have no mean.")
            return total / weight if weight else math.inf
        if self._reduction == "sum":
            return None
        if active is not None:
            [count] = active.wait()
            return int(count.item())
        return self._transport.world_size

    def _aside(self, device: torch.device) -> AbstractContextManager[object]:
        """Where to ask a GPU for what must not come behind all else. See [Note: read aside]."""
        if not streams.has_streams(device):
            return nullcontext()
        module = torch.get_device_module(device)
        if self._side_stream is None:
            self._side_stream = module.Stream(device)
        return module.stream(self._side_stream)
