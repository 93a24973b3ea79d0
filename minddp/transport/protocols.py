"""How bytes travel between ranks, as the reducer sees it: two protocols and nothing else.

Everything above this line is written against `Transport` and `Work`; vendor branches stay in the adapters.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A collective that is under way."""

    def wait(self, timeout: datetime.timedelta = ...) -> object:
        """Return once the result may be used, or raise once `timeout` has passed; see `Transport.waits_again`.

        On a CPU that is when it is complete. On a GPU the calling stream is made to wait and the host is
        not, as with `torch.distributed.Work.wait` on NCCL.

        Raises:
            RuntimeError: the collective failed, a peer is gone, or a time limit has passed.
        """
        ...

    def is_completed(self) -> bool: ...


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

    @property
    def waits_again(self) -> bool:
        """Whether a work whose `wait(timeout)` has raised "timed out" goes on and can be waited for again."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor, its contents undefined, in memory that this transport reduces fastest.

        It lives as long as anybody refers to it, as any tensor. Ranks may allocate independently of each other.

        Raises:
            RuntimeError: there is no room.
        """
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
