"""The samples of each share: torch's sampler with the share as its rank, and one loader per share.

Each batch is loaded with its own random state. So any rank can load the batch of a share, even if it takes the
share over in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from minddp.tools.elastic.random_state import random_state_is_kept, seed_all


class ShareLoader:
    """Batches of `batch_size` samples for every share. Each share has its own DataLoader with these `options`."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        num_shares: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ):
        self.epoch = 0
        self._dataset = dataset
        self._seed = seed
        self._samplers: list[DistributedSampler[Any]] = [
            DistributedSampler(dataset, num_shares, share, shuffle, seed, drop_last) for share in range(num_shares)
        ]
        self._batch_samplers = [BatchSampler(sampler, batch_size, drop_last) for sampler in self._samplers]
        self._options = options
        self._batches: dict[int, tuple[int, Iterator[Any]]] = {}  # by share: the next step, and its iterator

    def __len__(self) -> int:
        """The number of steps in an epoch."""
        return len(self._batch_samplers[0])

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch. The next step may be any one."""
        self.epoch = epoch
        for sampler in self._samplers:
            sampler.set_epoch(epoch)
        self._batches.clear()

    def batch(self, step: int, share: int) -> Any:
        """The batch of a share in a step of this epoch. Consecutive steps are prefetched.

        Raises:
            IndexError: the epoch has fewer steps.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"An epoch of {len(self)} steps has no step {step}.")
        due, batches = self._batches.get(share, (-1, iter(())))
        if due != step:
            loader = DataLoader(
                _Seeded(self._dataset, self._seed, self.epoch),
                batch_sampler=list(self._batch_samplers[share])[step:],
                generator=torch.Generator(),  # else the workers' seed would be drawn from the share's random state
                **self._options,
            )
            batches = iter(loader)
        self._batches[share] = step + 1, batches
        return next(batches)


@dataclass
class _Seeded(Dataset[Any]):
    """Loads each batch with a random state that depends only on the seed, the epoch and the first index."""

    dataset: Any
    seed: int
    epoch: int

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A DataLoader calls this for each batch."""
        with random_state_is_kept():
            seed_all(self.seed, self.epoch, indices[0])
            return [self.dataset[index] for index in indices]
