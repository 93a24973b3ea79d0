"""The sum of a bucket over all shares, in the order of the tree, between ranks.

Each rank owns one chunk of each bucket. In a first exchange, which overlaps with backward, all ranks send each owner
its chunk of each of their sums, and the owner adds them in the tree's order. In a second exchange the owners send
their results to all ranks. If each rank has one sum, both together send as many bytes as a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minddp.core.reduction import PendingAllReduce, PendingReduction
from minddp.tools.elastic.addition_tree import additions, deal, sums_of
from minddp.transport.protocols import AdditionOrder, Transport, Work


class TreeSums:
    """Tree sums, times `factor`. Call `launch` in the same order on every rank.

    If each rank has one sum, and the transport can add in a given order, the transport does it all.
    """

    def __init__(self, transport: Transport, num_shares: int, factor: float):
        self.transport = transport
        sums = [sums_of(block, num_shares) for block in deal(num_shares, transport.world_size)]
        self._num_sums = [len(of_rank) for of_rank in sums]
        nodes = [node for of_rank in sums for node in of_rank]
        self._order = AdditionOrder(additions(nodes, num_shares), factor)

    def launch(self, parts: Sequence[torch.Tensor], total: torch.Tensor) -> PendingReduction:
        """`parts`: this rank's sums, flat and in order. The last one, `total`, becomes the sum over all shares."""
        transport, world_size = self.transport, self.transport.world_size
        if 1 < world_size == sum(self._num_sums):
            work = transport.sum_in_order(total, self._order)
            if work is not None:
                return PendingAllReduce(work, total)
        chunks_of_parts = [part.tensor_split(world_size) for part in parts]
        sizes = list(map(len, chunks_of_parts[0]))
        own_size = sizes[transport.rank]
        received = total.new_empty(sum(self._num_sums) * own_size)
        by_owner = [chunk for chunks in zip(*chunks_of_parts, strict=True) for chunk in chunks]
        work = transport.all_to_all(
            received,
            parts[0] if len(parts) == 1 else torch.cat(by_owner),
            [number * own_size for number in self._num_sums],
            [len(parts) * size for size in sizes],
        )
        return TreeSum(self, total, received.view(sum(self._num_sums), own_size), sizes, work)

    def add(self, sums: torch.Tensor) -> torch.Tensor:
        """The scaled sum of the rows, which are this rank's chunk of all sums. Overwrites them."""
        for left, right in self._order.steps:
            sums[left].add_(sums[right])
        return sums[0].mul_(self._order.factor)


@dataclass(frozen=True, eq=False)
class TreeSum:
    """A `PendingReduction`. When `work` is done, `received` has this rank's chunk of all sums."""

    sums: TreeSums
    total: torch.Tensor
    received: torch.Tensor
    sizes: Sequence[int]  # of the chunks, by owner
    work: Work

    def result(self) -> torch.Tensor:
        self.work.wait()
        own, num_owners = self.sums.add(self.received), len(self.sizes)
        sizes_out = [len(own)] * num_owners
        self.sums.transport.all_to_all(self.total, own.repeat(num_owners), self.sizes, sizes_out).wait()
        return self.total

    def when_complete(self, callback: Callable[[], object]) -> None:
        """Not called: the sum is complete only in `result`."""
