"""The samples of each share: torch's sampler with the share as its rank, read by a loader for each share.

Which samples a share gets in which step follows from the dataset, the number of shares, the seed, the epoch and the
step alone. Each batch is loaded in a random state of its own, so augmentation does not depend on the worker.
Whichever rank computes a share can load its batch, also one that has taken it over in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from minddp.tools.elastic.random_state import random_state_is_kept, seed_all


class ShareLoader:
    """Batches of `batch_size` samples for every share, each by a DataLoader of its own.

    `options` are those of `DataLoader`, such as `num_workers`, for each share.
    """

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
        self.num_shares = num_shares
        self.epoch = 0
        self._dataset = dataset
        self._batch_size = batch_size
        self._sampling: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        self._options = options
        self._batches: dict[int, tuple[int, Iterator[Any]]] = {}  # by share, with the step of the next batch

    def __len__(self) -> int:
        """Steps in an epoch."""
        steps, rest = divmod(len(self._sampler(0)), self._batch_size)
        return steps + bool(rest and not self._sampling["drop_last"])

    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew; the next step is 0, or any other."""
        self.epoch = epoch
        self._batches.clear()

    def batch(self, step: int, share: int) -> Any:
        """The batch of a share in a step of this epoch. Steps in order are loaded ahead, others begin anew.

        Raises:
            IndexError: the epoch has fewer steps.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"An epoch of {len(self)} steps has no step {step}.")
        due, batches = self._batches.get(share, (-1, iter(())))
        if due != step:
            sampler = self._sampler(share)
            sampler.set_epoch(self.epoch)
            loader = DataLoader(
                _Seeded(self._dataset, self._sampling["seed"], self.epoch),
                self._batch_size,
                sampler=list(sampler)[step * self._batch_size :],
                drop_last=self._sampling["drop_last"],
                generator=torch.Generator(),  # else the workers' seed is drawn from the share's random state
                **self._options,
            )
            batches = iter(loader)
        self._batches[share] = step + 1, batches
        return next(batches)

    def _sampler(self, share: int) -> DistributedSampler[Any]:
        return DistributedSampler(self._dataset, self.num_shares, share, **self._sampling)


class _Seeded(Dataset[Any]):
    """A dataset that loads each batch in a random state that follows from the epoch and the first index."""

    def __init__(self, dataset: Any, seed: int, epoch: int):
        self._dataset = dataset
        self._numbers = (seed, epoch)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """What a DataLoader calls for a batch."""
        with random_state_is_kept():
            seed_all(*self._numbers, indices[0])
            if hasattr(self._dataset, "__getitems__"):
                return self._dataset.__getitems__(indices)
            return [self._dataset[index] for index in indices]
