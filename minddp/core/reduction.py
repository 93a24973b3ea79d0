"""How a bucket is reduced, and a bucket that is under way.

A `Reducing` is a strategy: divide and sum (`MeanBeforeSum`), sum and divide (modes/mixed_precision.py), or what a
communication hook does (comm_hooks/).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from minddp.core.bucket import GradientBucket
from minddp.core.packing import Scaling
from minddp.transport.protocols import Transport, Work

#: What each rank divides its gradients by in the backward that begins; `None` where the sum itself is wanted.
DivisorOfBackward = Callable[[], float | None]


class Reduction(Protocol):
    """A bucket under way."""

    def result(self) -> torch.Tensor:
        """Wait, and return the averaged bucket, flat."""
        ...

    def when_complete(self, callback: Callable[[], object]) -> None:
        """Have `callback` called, by any thread, as soon as the collective is complete.

        On a GPU it is called at once, with a current stream that the collective precedes. It is never called
        where a backend's work has no future to ask.
        """
        ...


class Reducing(Protocol):
    """Reduces the buckets of one wrapper."""

    def open(self) -> Scaling:
        """A backward begins that is reduced: how its gradients are scaled while they are packed."""
        ...

    def launch(self, bucket: GradientBucket, contents: torch.Tensor | None = None, *, is_last: bool) -> Reduction:
        """Begin to reduce a bucket, or `contents` in its place. Returns at once."""
        ...


@dataclass(frozen=True)
class AllReduce:
    """The buffer is summed in place, and divided by `divisor` then if that was not done while packing."""

    work: Work
    buffer: torch.Tensor
    divisor: float | None = None

    def result(self) -> torch.Tensor:
        self.work.wait()
        if self.divisor is not None:
            self.buffer.div_(self.divisor)
        return self.buffer

    def when_complete(self, callback: Callable[[], object]) -> None:
        get_future = getattr(self.work, "get_future", None)
        if get_future is not None:
            get_future().add_done_callback(lambda _future: callback())


@dataclass(eq=False)
class MeanBeforeSum:
    """Each rank divides its gradients while packing; an all-reduce sums them. What torch does by default.

    `divides_resident` and `divides_copied`: see `Scaling`.
    """

    transport: Transport
    divisor: DivisorOfBackward
    divides_resident: bool
    divides_copied: bool
    weighs_nothing: bool = False

    def open(self) -> Scaling:
        divisor = self.divisor()
        self.weighs_nothing = divisor == math.inf
        return Scaling(
            divisor=divisor,
            divide_copied=self.divides_copied,
            divide_resident=self.divides_copied or self.divides_resident,
            as_real=self.divides_copied,
            restores_unused=self.divides_resident and divisor is None,
        )

    def launch(self, bucket: GradientBucket, contents: torch.Tensor | None = None, *, is_last: bool) -> Reduction:
        if contents is None:  # infinity would not turn a NaN into zero
            contents = bucket.wire.zero_() if self.weighs_nothing else bucket.wire
        return AllReduce(self.transport.all_reduce(contents), contents)
