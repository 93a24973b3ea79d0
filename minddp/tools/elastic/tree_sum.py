"""The sum of one bucket over all shares, in the order of the tree, between ranks.

[Note: two exchanges]
Each rank owns one chunk of each bucket. First all ranks send each owner the chunk of each of their sums; the owner
adds them by the tree. Then the owners send their results to all. Together these are as many bytes as a ring
all-reduce sends, as long as each rank has one sum.

The first exchange is under way while backward computes. The second begins when backward waits for the first bucket,
for all buckets at once: to begin it whenever the first has arrived would make ranks launch in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minddp.core.reduction import PendingAllReduce, PendingReduction
from minddp.tools.elastic.addition_tree import add_up, deal, steps_between, sums_of
from minddp.transport.protocols import AdditionOrder, Transport, Work


class TreeSums:
    """All tree sums of one backward, times `factor`. `launch` in the same order on every rank.

    Where each rank has one sum, and the transport adds in any order, there is nothing else to do.
    """

    def __init__(self, transport: Transport, num_shares: int, factor: float):
        self._transport = transport
        self._num_shares = num_shares
        self._factor = factor
        self._sums = [sums_of(block, num_shares) for block in deal(num_shares, transport.world_size)]  # by rank
        self._nodes = [node for of_rank in self._sums for node in of_rank]
        self._under_way: list[TreeSum] = []
        self._order: AdditionOrder | None = None
        if 1 < len(self._nodes) == transport.world_size:
            self._order = AdditionOrder(steps_between(self._nodes, num_shares), factor)

    def begin_pass(self) -> None:
        self._under_way = []

    def launch(self, parts: Sequence[torch.Tensor], total: torch.Tensor) -> PendingReduction:
        """`parts`: this rank's sums, flat and in order; the last, `total`, is to become the sum over all shares."""
        if self._order is not None:
            work = self._transport.sum_in_order(total, self._order)
            if work is not None:
                return PendingAllReduce(work, total)
        if self._transport.world_size == 1:
            return TreeSum(self, total, parts)
        self._under_way.append(self._send_to_owners(parts, total))
        return self._under_way[-1]

    def _send_to_owners(self, parts: Sequence[torch.Tensor], total: torch.Tensor) -> TreeSum:
        """The first exchange."""
        chunks_of_parts = [part.tensor_split(self._transport.world_size) for part in parts]
        sizes = list(map(len, chunks_of_parts[0]))
        chunk = sizes[self._transport.rank]
        incoming = total.new_empty(len(self._nodes) * chunk)
        by_owner = [piece for pieces in zip(*chunks_of_parts, strict=True) for piece in pieces]
        work = self._transport.all_to_all(
            incoming,
            parts[0] if len(parts) == 1 else torch.cat(by_owner),
            [len(nodes) * chunk for nodes in self._sums],
            [len(parts) * size for size in sizes],
        )
        return TreeSum(self, total, incoming.view(len(self._nodes), chunk).unbind(), sizes, work)

    def add(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The scaled sum of the values of all nodes, in the tree's order. Overwrites them."""
        by_node = dict(zip(self._nodes, values, strict=True))
        return add_up(by_node, self._num_shares, torch.Tensor.add_).mul_(self._factor)

    def add_all(self) -> None:
        """Begin the second exchange of every bucket. See [Note: two exchanges]."""
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            assert each.work is not None
            each.work.wait()
            chunk, num_owners = self.add(each.values), len(each.sizes)
            each.work = self._transport.all_to_all(
                each.total, chunk.repeat(num_owners), each.sizes, [len(chunk)] * num_owners
            )
            each.values = ()


@dataclass(eq=False)
class TreeSum:
    """One bucket under way. `values` are those of all nodes, in the chunk of this rank, once `work` is done."""

    sums: TreeSums
    total: torch.Tensor
    values: Sequence[torch.Tensor]
    sizes: Sequence[int] = ()  # of the owners' chunks
    work: Work | None = None

    def result(self) -> torch.Tensor:
        if self.work is None:
            return self.total.copy_(self.sums.add(self.values))
        self.sums.add_all()
        self.work.wait()
        return self.total

    def when_complete(self, callback: Callable[[], object]) -> None:
        """Not known before `result`."""
