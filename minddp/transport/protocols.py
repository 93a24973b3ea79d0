"""What the rest of the package sees of a transport: the protocols `Transport` and `Work`, and nothing else.

Everything above this layer is written against these two; what depends on a backend stays in the adapters.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A collective in flight."""

    def wait(self, timeout: datetime.timedelta = ...) -> object:
        """Return once the result may be used: on a CPU when it is complete, on a GPU when the calling stream waits.

        Raises:
            RuntimeError: the collective failed, a peer has ended, or a time limit has passed.
        """
        ...

    def is_completed(self) -> bool: ...


class Transport(Protocol):
    """Collectives among a group of ranks. All ranks must make the same calls in the same order."""

    rank: int
    world_size: int

    @property
    def store(self) -> dist.Store | None:
        """The ranks' key-value store, which also answers while collectives are stuck; `None` if there is none."""
        ...

    @property
    def waits_again(self) -> bool:
        """True if a work goes on after its `wait(timeout)` has raised "timed out", and can be waited for again."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor with undefined contents, in the memory that this transport reduces fastest. Not collective.

        Raises:
            RuntimeError: out of memory.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Begin to replace `tensor` on each rank by the sum over all ranks. Returns at once."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Begin to replace `tensor` on each rank by that of rank `source` of the group. Returns at once."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors of all ranks in rank order; shapes and dtypes must be equal on all ranks. Blocks."""
        ...
