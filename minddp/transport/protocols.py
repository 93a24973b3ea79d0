"""The interface of a transport. Only the adapters depend on a backend."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist


class Work(Protocol):
    """A collective in flight."""

    def wait(self, timeout: datetime.timedelta = ...) -> object:
        """Return once the result may be used: on a CPU when it is complete, on a GPU when the calling stream waits.

        Raises:
            RuntimeError: the collective failed, a peer has ended, or a time limit has passed.
        """

    def is_completed(self) -> bool: ...


@runtime_checkable
class Transport(Protocol):
    """Collectives among a group of ranks. All ranks must make the same calls in the same order."""

    rank: int
    world_size: int
    adds_after_s: float  # the delay before an all-reduce makes progress while no rank waits for it

    @property
    def store(self) -> dist.Store | None:
        """The ranks' key-value store, which also answers while collectives are stuck; `None` if there is none."""

    @property
    def waits_again(self) -> bool:
        """True if a work goes on after a timeout of its `wait`, and can be waited for again."""

    def when_group_ends(self, end: Callable[[], object]) -> object:
        """Have `destroy_process_group` call `end`, as long as the caller keeps the returned object."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor with undefined contents, in memory that this transport reduces fastest. Not collective.

        Raises:
            RuntimeError: out of memory.
        """

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Begin to replace `tensor` on each rank by the sum over all ranks. Returns at once."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Begin to replace `tensor` on each rank by the one of rank `source` of the group. Returns at once."""

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, sizes_in: Sequence[int], sizes_out: Sequence[int]
    ) -> Work:
        """Begin to send each rank its part of `sent`, and to receive theirs. Sizes are in elements, by rank."""

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors of all ranks in rank order; shapes and dtypes must be equal on all ranks. Blocks."""


class DropsTogether:
    """A transport that counts its collectives, so that all ranks drop an interrupted backward, or none does."""

    def settle(self) -> None:
        """All ranks have made the same collectives so far."""

    def agree_to_drop(self) -> None:
        """Return once all ranks drop their collectives since `settle`. Raises an error if one does not."""
