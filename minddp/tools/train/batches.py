"""The samples of each rank, their order, and the position from which a run resumes."""

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
    """A position in the data: the samples of this epoch that all ranks together have taken."""

    epoch: int = 0
    samples: int = 0


class Batches:
    """The training batches of every logical rank, from `position` on.

    `DistributedSampler` shuffles with seed + epoch, the same on every rank, and deals the samples out one by one.
    Without `set_epoch` every epoch would have the order of the first. Because the order is a function of (seed,
    epoch), a count of samples is a position, also with another number of ranks, rounded up to whole batches.

    `drop_last` drops samples of an epoch that do not fill a batch of every rank. So all batches have the same size,
    and the mean over ranks of the batches' means, which DDP computes, is the mean over all samples.
    """

    def __init__(self, dataset: Dataset[Any], settings: Settings, num_logical_ranks: int, pin_memory: bool = False):
        self.position = Position()
        self.waited_s = 0.0  # time spent waiting for data since the last training record
        self._samples_per_pass = settings.batch_size * num_logical_ranks
        self._loader = ShareLoader(
            dataset,
            settings.batch_size,
            num_logical_ranks,
            seed=settings.seed,
            drop_last=True,
            num_workers=settings.workers,
            pin_memory=pin_memory,
        )
        if len(self._loader) == 0:
            raise SettingsError(
                f"{len(dataset)} training samples do not fill one batch of {settings.batch_size} for each of "  # type: ignore[arg-type]
                f"{num_logical_ranks} ranks; lower --batch-size or --nproc."
            )

    def of(self, logical_rank: int) -> Batch:
        began = time.monotonic()
        if self._index >= len(self._loader):
            self.position = Position(self.position.epoch + 1)
        if self._loader.epoch != self.position.epoch:
            self._loader.set_epoch(self.position.epoch)
        batch = self._loader.batch(self._index, logical_rank)
        self.waited_s += time.monotonic() - began
        return batch

    def advance(self) -> None:
        self.position = Position(self.position.epoch, (self._index + 1) * self._samples_per_pass)

    @property
    def _index(self) -> int:
        """The index of the current batch in the epoch."""
        return -(-self.position.samples // self._samples_per_pass)


def validation_batches(
    dataset: Dataset[Any], settings: Settings, logical_rank: int, num_logical_ranks: int
) -> DataLoader[Batch]:
    """One logical rank's part of --validation-samples samples, spread evenly over the data set.

    Every sample is validated once. `DistributedSampler` would repeat samples until all ranks have equally many, and
    the average would depend on the number of ranks.
    """
    length: int = len(dataset)  # type: ignore[arg-type]
    samples = min(settings.validation_samples, length)
    part = Subset(dataset, [i * length // samples for i in range(samples)][logical_rank::num_logical_ranks])
    batch_size = 4 * settings.batch_size  # without a backward, activations are not kept
    # With a generator of its own the loader does not draw its workers' seed from the global random state.
    return DataLoader(part, batch_size, num_workers=settings.workers, generator=torch.Generator())
