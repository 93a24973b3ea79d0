"""The samples of each rank, their order, and the position from which a run resumes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from minddp.tools.elastic.share_data import ShareLoader
from minddp.tools.train.settings import Settings, SettingsError
from minddp.tools.train.world import World

Batch = tuple[Tensor, Tensor]  # inputs, targets


class Batches:
    """The training batches of every logical rank, from the position (`epoch`, `samples`) on.

    `DistributedSampler` shuffles with seed + epoch, the same on every rank, and deals the samples out one by one.
    Without `set_epoch` every epoch would have the order of the first. Because the order is a function of (seed,
    epoch), a count of samples is a position, also with another number of ranks, rounded up to whole batches.

    `drop_last` drops samples of an epoch that do not fill a batch of every rank. So all batches have the same size,
    and the mean over ranks of the batches' means, which DDP computes, is the mean over all samples.
    """

    def __init__(self, dataset: Dataset[Any], settings: Settings, num_logical_ranks: int, pin_memory: bool = False):
        self.epoch = 0
        self.samples = 0  # of this epoch, that all ranks together have taken
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
        if self._index >= len(self._loader):
            self.epoch, self.samples = self.epoch + 1, 0
        if self._loader.epoch != self.epoch:
            self._loader.set_epoch(self.epoch)
        return self._loader.batch(self._index, logical_rank)

    def advance(self) -> None:
        self.samples = (self._index + 1) * self._samples_per_pass

    @property
    def _index(self) -> int:
        """The index of the current batch in the epoch."""
        return -(-self.samples // self._samples_per_pass)


def validation_batches(dataset: Dataset[Any], settings: Settings, world: World) -> DataLoader[Batch]:
    """This rank's part of --validation-samples samples, spread evenly over the data set.

    Every sample is validated once. `DistributedSampler` would repeat samples until all ranks have equally many, and
    the average would depend on the number of ranks.
    """
    length: int = len(dataset)  # type: ignore[arg-type]
    samples = min(settings.validation_samples, length)
    part = Subset(dataset, [i * length // samples for i in range(samples)][world.rank :: world.size])
    batch_size = 4 * settings.batch_size  # without a backward, activations are not kept
    return DataLoader(part, batch_size, num_workers=settings.workers, generator=torch.Generator())
