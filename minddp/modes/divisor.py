"""The divisor of the sum over the ranks.

Usually it is the number of ranks. Under `join` with divide_by_initial_world_size=False it is the number of ranks
that had inputs when the forward began. With weights, rank r's gradients are multiplied by `weight[r] /
sum(weights)`: the mean over all samples, if ranks have batches of different sizes. `weigh` waits for the sum of the
weights, on a GPU for all earlier work, too. Without it nothing is communicated.
"""

from __future__ import annotations

import math

import torch

from minddp.core.mode import Mode
from minddp.transport.protocols import Transport

_WEIGHED = "`weigh` applied to that one. Compute one loss from all outputs, or call `weigh` before each backward"
_JOINED = "a rank that has run out of inputs would not take part in this one. Compute one loss from all outputs"


class Divisor(Mode):
    """`for_this_backward()` is the divisor of this rank's gradients, applied before the sum."""

    def __init__(self, transport: Transport):
        self._transport = transport
        self._active: torch.futures.Future[list[torch.Tensor]] | None = None
        self._weighted: float | None = None  # the divisor for this rank's weight
        self._forwards = 0  # since `weigh`
        self.is_joined = False  # the next backward is one under `join`

    def change_ranks(self, transport: Transport) -> None:
        """Continue with other ranks."""
        self._transport, self._active, self._weighted = transport, None, None

    def divide_by_active_ranks(self, count: torch.futures.Future[list[torch.Tensor]] | None) -> None:
        """Divide the next backward by the number of active ranks, the only element of `count`, if given."""
        self._active = count

    def weigh(self, weight: float, device: torch.device) -> None:
        """Weight this rank's gradients in the next backward. Collective.

        Raises:
            ValueError: the weight is negative or not finite.
            RuntimeError: all weights are zero.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"`weigh` takes a finite number, 0 or more, but got {weight!r}.")
        weights = torch.tensor([weight], dtype=torch.float64, device=device)
        self._transport.all_reduce(weights).wait()
        if (total := weights.item()) == 0:
            raise RuntimeError(
                "All ranks have the weight 0, so the gradients have no mean. Give at least one rank a weight."
            )
        self._weighted = total / weight if weight else math.inf
        self._forwards = 0
        self.why_not_twice = ""

    def require_no_weight(self) -> None:
        """Raises RuntimeError if the next backward has a weight, which a communication hook would not see."""
        if self._weighted is not None:
            raise RuntimeError(
                "`weigh` has been called for the next backward, and a communication hook would not see the weight. "
                "Register the hook after that backward, and multiply the loss by weights from then on."
            )

    def post_forward(self) -> None:
        self._forwards += 1

    def for_this_backward(self) -> float:
        """The divisor of the backward that begins now. To be called once in each backward.

        Raises:
            RuntimeError: `weigh` was called before an earlier forward.
        """
        active, self._active = self._active, None
        weighted, self._weighted = self._weighted, None
        self.why_not_twice = _WEIGHED if weighted is not None else _JOINED if self.is_joined else ""
        if weighted is not None:
            if self._forwards > 1:
                raise RuntimeError(
                    "`weigh` was called before an earlier forward, so this backward has no weight. Call `weigh` "
                    "on every rank after the last forward whose output is in the loss, and evaluate under "
                    "torch.no_grad()."
                )
            return weighted
        if active is not None:
            [count] = active.wait()
            return int(count.item())
        return self._transport.world_size
