"""How a bucket is reduced over the ranks.

A `ReduceStrategy` is an all-reduce with the division before or after it (`AllReduceStrategy`), a communication hook
(comm_hooks/), or the tree sum of logical ranks (tools/elastic/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from minddp.core.bucket import Bucket
from minddp.core.packing import Scaling
from minddp.transport.protocols import Transport, Work

#: The divisor of each rank's gradients in the backward that begins.
DivisorOfBackward = Callable[[], float]


class PendingReduction(Protocol):
    """A bucket that has been launched."""

    def result(self) -> torch.Tensor:
        """Wait, and return the averaged bucket, flat."""
        ...

    def when_complete(self, callback: Callable[[], object]) -> None:
        """Call `callback`, from any thread, as soon as the collective is complete.

        On a GPU it is called at once, with a current stream that runs after the collective. It is never called
        where a backend's work has no future.
        """
        ...


class ReduceStrategy(Protocol):
    """Reduces the buckets of one wrapper."""

    def begin_pass(self) -> Scaling:
        """A synchronised backward begins. Returns how its gradients are scaled while they are packed."""
        ...

    def launch(self, bucket: Bucket, contents: torch.Tensor, *, is_last: bool) -> PendingReduction:
        """Begin to reduce `contents`, as a rule `bucket.comm_buffer`. Returns at once."""
        ...


@dataclass(frozen=True)
class PendingAllReduce:
    """The sum is computed in place in `buffer`, and divided by `divisor` if there is one."""

    work: Work
    buffer: torch.Tensor
    divisor: float | None = None

    def result(self) -> torch.Tensor:
        self.work.wait()
        if self.divisor is not None:
            self.buffer.div_(self.divisor)
        return self.buffer

    def when_complete(self, callback: Callable[[], object]) -> None:
        if hasattr(self.work, "call_when_done"):  # of minddp's own transports
            self.work.call_when_done(callback)
        elif hasattr(self.work, "get_future"):
            self.work.get_future().add_done_callback(lambda _future: callback())


@dataclass(eq=False)
class AllReduceStrategy:
    """The mean by an all-reduce. By default each rank divides its gradients while packing them, as torch does.

    `scaling` says how, and gets its divisor in each backward. With `divides_after` the sum is divided instead.
    """

    transport: Transport
    divisor: DivisorOfBackward
    scaling: Scaling = field(default_factory=Scaling)
    divides_after: bool = False
    _divide_by: float | None = None

    def begin_pass(self) -> Scaling:
        divisor = self.divisor()
        if self.divides_after:
            self._divide_by = divisor
            return Scaling()
        return self.scaling._replace(divisor=divisor)

    def launch(self, bucket: Bucket, contents: torch.Tensor, *, is_last: bool) -> PendingReduction:
        return PendingAllReduce(self.transport.all_reduce(contents), contents, self._divide_by)
