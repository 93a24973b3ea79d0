"""The bucket of one sparse gradient, without a buffer: a copy of the gradient itself is reduced.

The number of its rows differs in each backward, so its memory cannot be allocated in advance. Torch scales the
gradient in place. But two embeddings whose outputs are added have the same values tensor in their gradients, which
would be scaled twice. So a copy is scaled here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from minddp.core.bucket import Bucket
from minddp.core.packing import Scaling


class SparseBucket(Bucket):
    """`comm_buffer` is the gradient that was packed, not coalesced. It is never a view of another buffer."""

    def _take_memory(self) -> None:
        """Release the last gradient, if any: until the next one there is a gradient without rows."""
        self.views, self.groups = [], []  # there is no flat buffer
        param = self.params[0]
        indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
        rows = param.new_empty((0, *param.shape[1:]))
        self.comm_buffer = torch.sparse_coo_tensor(
            indices, rows, param.shape, is_coalesced=True, check_invariants=False
        )

    def begin_pass(self, memory: Collection[int] = ()) -> None:
        self._take_memory()

    def pack(self, group: int, scaling: Scaling) -> None:
        """Copy the gradient, divided by the divisor. A missing one counts as a gradient without rows.

        Raises:
            RuntimeError: the gradient is dense.
        """
        grad = self.params[0].grad
        if grad is None:
            return
        if grad.layout != torch.sparse_coo:
            raise RuntimeError(
                f"Expected variable to have sparse gradient: `{self.names[0]}` belongs to an embedding with "
                f"sparse=True, but its gradient is {grad.layout}, because the weight has another use, too. Set "
                f"sparse=False."
            )
        self.comm_buffer = grad.clone() if scaling.divisor is None else grad / scaling.divisor

    def unpack(self, average: torch.Tensor, globally_unused: Sequence[bool] | None = None) -> None:
        if globally_unused and globally_unused[0]:
            return
        grad = self.params[0].grad
        if grad is None:
            self.params[0].grad = average
        else:
            grad.copy_(average)
