"""The samples of each rank, their order, and the position at which a run resumes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Subset

from minddp.train.settings import SettingsError

Batch = tuple[Tensor, Tensor]  # inputs, targets


@dataclass(frozen=True)
class Position:
    """A position in the data: the number of batches of this epoch that each rank has had."""

    epoch: int = 0
    batches: int = 0


class BatchStream:
    """One rank's training batches, epoch after epoch, from `position` on.

    [Note: set_epoch]
    `DistributedSampler` shuffles by seed + epoch, the same on every rank, and deals the samples out one by one.
    Without `set_epoch` every epoch has the order of the first. Because the order is a function of (seed, epoch),
    a run finds its position by counting, without reading what it skips.

    Each epoch leaves out the few samples that do not fill a batch on every rank (`drop_last`). So all
    batches have the same size, and the mean over ranks of the batches' means, which is what DDP computes, is
    the mean over all samples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        pin_memory: bool = False,
    ):
        self.position = Position()
        self.dataset = dataset
        self.pin_memory = pin_memory
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, world_size, rank, shuffle=True, seed=seed, drop_last=True
        )
        self.batch_sampler = BatchSampler(self.sampler, batch_size, drop_last=True)
        if len(self.batch_sampler) == 0:
            raise SettingsError(
                f"{len(dataset)} training samples do not fill one batch of {batch_size} on each of "  # type: ignore[arg-type]
                f"{world_size} ranks; lower --batch-size or --nproc."
            )

    def __iter__(self) -> Iterator[Batch]:
        """Batches without end; `position` counts a batch when it is yielded."""
        while True:
            for batch in self._rest_of_epoch():
                self.position = Position(self.position.epoch, self.position.batches + 1)
                yield batch
            self.position = Position(self.position.epoch + 1)

    def _rest_of_epoch(self) -> DataLoader[Batch]:
        self.sampler.set_epoch(self.position.epoch)  # See [Note: set_epoch].
        batches = list(self.batch_sampler)[self.position.batches :]
        # A loader draws a seed for its workers whenever an iteration begins: from a generator of its own
        # here, or a resumed run, which begins one iteration more, would draw other dropout masks.
        return DataLoader(
            self.dataset, batch_sampler=batches, pin_memory=self.pin_memory, generator=torch.Generator()
        )


def validation_batches(
    dataset: Dataset[Any], samples: int, batch_size: int, rank: int, world_size: int
) -> DataLoader[Batch]:
    """This rank's share of `samples` validation samples, spread evenly over the data set.

    Every sample goes to exactly one rank. `DistributedSampler` would repeat some of them until the shares are
    equal, and the average would depend on the number of ranks; here shares may differ by one.
    """
    shares = Subset(dataset, spread(len(dataset), samples)[rank::world_size])  # type: ignore[arg-type]
    return DataLoader(shares, batch_size=batch_size, generator=torch.Generator())


def spread(length: int, samples: int) -> list[int]:
    """At most `samples` indices, evenly spaced over `range(length)`."""
    samples = min(samples, length)
    return [i * length // samples for i in range(samples)]
