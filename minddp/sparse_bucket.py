"""The bucket of one sparse gradient: no buffer, no packing; the gradient itself travels.

A sparse gradient (of `nn.Embedding(sparse=True)`, say) is a list of indices with a row of values each, and
another backward brings another list. Nothing can be allocated for it in advance and nothing packed beside it,
so it has a bucket to itself, and what is reduced is the gradient where it lies, in place, as torch does it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minddp.packing import Scaling
from minddp.plan import BucketSpec


class SparseBucket:
    """Has what the reducer asks of a `Bucket`. `wire` is the gradient of the current backward, not coalesced."""

    def __init__(self, spec: BucketSpec, param: torch.nn.Parameter, name: str):
        self.spec = spec
        self.params = [param]
        self.names = [name]
        self.wire = _nothing(param)

    def params_by_run(self) -> list[list[int]]:
        return [[slot.param for slot in self.spec.slots]]

    def begin_pass(self) -> None:
        """Drop the gradient of the last backward: it may have been replaced since."""
        self.wire = _nothing(self.params[0])

    def pack(self, run: int, scaling: Scaling) -> None:
        """Scale the gradient where it lies. A missing one counts as a gradient without rows.

        Raises:
            RuntimeError: the gradient is dense.
        """
        grad = self.params[0].grad
        if grad is None:
            return
        if grad.layout != torch.sparse_coo:
            raise RuntimeError(
                f"Expected variable to have sparse gradient: `{self.names[0]}` belongs to an embedding with "
                f"sparse=True, but its gradient is {grad.layout}. Something else uses the weight too; set "
                f"sparse=False."
            )
        self.wire = grad
        if scaling.divisor is not None:
            self.wire.div_(scaling.divisor)

    def unpack(
        self,
        average: torch.Tensor,
        *,
        untouched: Sequence[bool] | None = None,
        made_now: Sequence[bool] | None = None,
    ) -> None:
        """As `Bucket.unpack`."""
        if untouched and untouched[0]:
            return
        grad = self.params[0].grad
        if grad is None:
            self.params[0].grad = average
        elif grad is not average:
            grad.copy_(average)


def _nothing(param: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without rows."""
    rows = param.new_empty((0, *param.shape[1:]))
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=param.device), rows, param.shape, is_coalesced=True
    )
