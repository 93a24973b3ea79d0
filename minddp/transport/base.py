"""How bytes travel between ranks, as the reducer sees it: two protocols and nothing else.

Everything above this line is written against `Transport` and `Work`; vendor branches stay in the adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A collective that is under way."""

    def wait(self) -> object:
        """Return once the result may be used.

        On a CPU that is when it is complete. On a GPU the calling stream is made to wait and the host is
        not, as with `torch.distributed.Work.wait` on NCCL.

        Raises:
            RuntimeError: the collective failed, a peer is gone, or the group's time limit has passed.
        """
        ...


class Transport(Protocol):
    """A group of ranks that can add up and spread tensors. All ranks must make the same calls in one order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def store(self) -> dist.Store | None:
        """A key-value store between the ranks that answers also while collectives are stuck, if there is one."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Begin to replace `tensor` on each rank by the sum over all ranks. Returns at once."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Begin to replace `tensor` on each rank by that of rank `source` of the group. Returns at once."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors of all ranks in rank order; shapes and dtypes must agree. Blocks."""
        ...
