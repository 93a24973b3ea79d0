"""A reduction: the mean over those ranks whose gradients are finite.

    ddp = minddp.DistributedDataParallel(model, reduction=MeanWithoutNan)

A rank with NaN or infinity in a bucket contributes zeros to that bucket, and does not count in its mean. Where all
ranks have one, the average is NaN. Without any, it is torch's mean, but divided after the sum, not before. So on
2, 4, 8, ... ranks it has the same bits, unless a sum overflows or a quotient is denormal, and on others it rounds
otherwise. For dense gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from minddp.core.bucket import GradientBucket
from minddp.core.packing import Scaling
from minddp.core.reduction import AllReduce
from minddp.transport import Transport


@dataclass(frozen=True)
class MeanUnderWay:
    """A bucket under way, and beside it the number of ranks that count."""

    sums: AllReduce
    count: AllReduce

    def result(self) -> torch.Tensor:
        return self.sums.result().div_(self.count.result())

    def when_complete(self, callback: Callable[[], object]) -> None:
        self.sums.when_complete(callback)


class MeanWithoutNan:
    """Made by the wrapper on each rank, which calls `open` in each backward and `launch` for each bucket."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def open(self) -> Scaling:
        return Scaling()  # packing divides by nothing

    def launch(
        self, bucket: GradientBucket, contents: torch.Tensor | None = None, *, is_last: bool
    ) -> MeanUnderWay:
        """`contents`: zeros of a rank that has run out of inputs (`join`); it does not count either."""
        gradients = bucket.wire if contents is None else contents
        counts = contents is None and bool(gradients.isfinite().all())
        if not counts:
            gradients.zero_()
        return MeanUnderWay(self._summed(gradients), self._summed(gradients.new_full((1,), counts)))

    def _summed(self, tensor: torch.Tensor) -> AllReduce:
        return AllReduce(self._transport.all_reduce(tensor), tensor)
