"""The samples of each rank, their order, and the position at which a run resumes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from minddp.tools.elastic.share_data import ShareLoader
from minddp.tools.train.settings import Settings, SettingsError

Batch = tuple[Tensor, Tensor]  # inputs, targets


@dataclass(frozen=True)
class Position:
    """A position in the data: the number of samples of this epoch that all ranks together have had."""

    epoch: int = 0
    samples: int = 0


class Batches:
    """Training batches from `position` on, dealt to shares: one for each rank, or for each logical rank.

    [Note: set_epoch]
    `DistributedSampler` shuffles by seed + epoch, the same for every share, and deals the samples out one by one.
    Without `set_epoch` every epoch has the order of the first. Because the order is a function of (seed, epoch), a
    run finds its position by counting, also with another number of ranks, rounded up to whole batches of all.

    Each epoch leaves out the samples that do not fill a batch of every share (`drop_last`). So all batches have the
    same size, and the mean over ranks of the batches' means, which DDP computes, is the mean over all samples.
    """

    def __init__(self, dataset: Dataset[Any], settings: Settings, num_shares: int, pin_memory: bool = False):
        self.position = Position()
        self.waited_s = 0.0  # for data; the log sets it to 0 with each record
        self._samples_at_once = settings.batch_size * num_shares
        self._loader = ShareLoader(
            dataset,
            settings.batch_size,
            num_shares,
            seed=settings.seed,
            drop_last=True,
            num_workers=settings.workers,
            prefetch_factor=settings.prefetch if settings.workers else None,
            pin_memory=pin_memory,
        )
        if len(self._loader) == 0:
            raise SettingsError(
                f"{len(dataset)} training samples do not fill one batch of {settings.batch_size} for each of "  # type: ignore[arg-type]
                f"{num_shares} ranks; lower --batch-size or --nproc."
            )

    def of_share(self, share: int) -> Batch:
        began = time.monotonic()
        if self._index >= len(self._loader):
            self.position = Position(self.position.epoch + 1)
        if self._loader.epoch != self.position.epoch:
            self._loader.set_epoch(self.position.epoch)  # See [Note: set_epoch].
        batch = self._loader.batch(self._index, share)
        self.waited_s += time.monotonic() - began
        return batch

    def advance(self) -> None:
        self.position = Position(self.position.epoch, (self._index + 1) * self._samples_at_once)

    @property
    def _index(self) -> int:
        """Of the current batch in the epoch, the same for every share."""
        return -(-self.position.samples // self._samples_at_once)


def validation_batches(dataset: Dataset[Any], settings: Settings, share: int, num_shares: int) -> DataLoader[Batch]:
    """One share's part of --validation-samples samples, spread evenly over the data set.

    Every sample goes to exactly one share. `DistributedSampler` would repeat some of them until all have as many,
    and the average would depend on the number of ranks; here shares may differ by one.
    """
    length: int = len(dataset)  # type: ignore[arg-type]
    samples = min(settings.validation_samples, length)
    part = Subset(dataset, [i * length // samples for i in range(samples)][share::num_shares])
    batch_size = 4 * settings.batch_size  # there is room: no activations are kept for a backward
    # A loader draws a seed for its workers: from a generator of its own, or the run would draw others after this.
    return DataLoader(part, batch_size, num_workers=settings.workers, generator=torch.Generator())
