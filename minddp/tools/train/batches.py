"""The samples of each rank, their order, and the position from which a run resumes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from minddp.platform import streams
from minddp.tools.elastic.share_data import ShareLoader
from minddp.tools.train.settings import Settings, SettingsError
from minddp.tools.train.world import World

Batch = tuple[Tensor, Tensor]  # inputs, targets


class Batches:
    """The training batches of this rank, from the position (`epoch`, `samples`) on.

    `DistributedSampler` shuffles with seed + epoch, the same on every rank, and deals the samples out one by one.
    Without `set_epoch` every epoch would have the order of the first. Because the order is a function of (seed,
    epoch), a count of samples is a position, also with another number of ranks, rounded up to whole batches.

    `drop_last` drops samples of an epoch that do not fill a batch of every rank. So all batches have the same size,
    and the mean over ranks of the batches' means, which DDP computes, is the mean over all samples.
    """

    def __init__(self, dataset: Dataset[Any], settings: Settings, world: World):
        self.epoch = 0
        self.samples = 0  # of this epoch, that all ranks together have taken
        self._rank = world.rank
        self._samples_per_pass = settings.batch_size * world.size
        self._loader = ShareLoader(
            dataset,
            settings.batch_size,
            world.size,
            seed=settings.seed,
            drop_last=True,
            num_workers=settings.workers,
            pin_memory=streams.has_streams(world.device),
        )
        if len(self._loader) == 0:
            raise SettingsError(
                f"{len(dataset)} training samples do not fill one batch of {settings.batch_size} for each of "  # type: ignore[arg-type]
                f"{world.size} ranks; lower --batch-size or --nproc."
            )

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self._loader.set_epoch(self.epoch)
            done = math.ceil(self.samples / self._samples_per_pass)
            for index in range(done, len(self._loader)):
                self.samples = (index + 1) * self._samples_per_pass
                yield self._loader.batch(index, self._rank)
            self.epoch, self.samples = self.epoch + 1, 0


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
