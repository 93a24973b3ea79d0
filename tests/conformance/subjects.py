"""Two classes to run the tests with, to check the tests and how they are run.

`Unchanged` is torch's own under another name: what passes natively must pass with it, or else the swap is at fault.
`NeverSynchronises` must fail.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel


class Unchanged(DistributedDataParallel):
    """Torch's DDP."""


class NeverSynchronises(DistributedDataParallel):
    """Torch's DDP as if always under `no_sync`: every rank keeps its own gradients."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.require_backward_grad_sync = False
        return super().forward(*inputs, **kwargs)
