"""The sum of a bucket over all shares, in the order of the tree, between ranks.

Each rank owns one chunk of each bucket. In a first exchange all ranks send each owner its chunk of each of their
sums, and the owner adds them in the tree's order. In a second exchange the owners send their results to all ranks.
If each rank has one sum, both together send as many bytes as a ring all-reduce.

The first exchange overlaps with backward. The second begins when backward waits for the first bucket, for all
buckets at once: if it began whenever a first exchange is complete, ranks would launch in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minddp.core.reduction import PendingReduction
from minddp.tools.elastic.addition_tree import add_up, deal, sums_of
from minddp.transport.protocols import Transport, Work


class TreeSums:
    """The tree sums of one backward, times `factor`. Call `launch` in the same order on every rank."""

    def __init__(self, transport: Transport, num_shares: int, factor: float):
        self._transport = transport
        self._num_shares = num_shares
        self._factor = factor
        self._sums = [sums_of(block, num_shares) for block in deal(num_shares, transport.world_size)]  # by rank
        self._nodes = [node for of_rank in self._sums for node in of_rank]
        self._under_way: list[TreeSum] = []

    def begin_pass(self) -> None:
        self._under_way = []

    def launch(self, parts: Sequence[torch.Tensor], total: torch.Tensor) -> PendingReduction:
        """`parts`: this rank's sums, flat and in order. The last one, `total`, becomes the sum over all shares."""
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
        """The scaled sum of the values of all nodes, in the tree's order. Overwrites the values."""
        by_node = dict(zip(self._nodes, values, strict=True))
        return add_up(by_node, self._num_shares, torch.Tensor.add_).mul_(self._factor)

    def add_all(self) -> None:
        """Begin the second exchange of every bucket."""
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
    """A `PendingReduction`. When `work` is done, `values` are this rank's chunk of the sums of all nodes."""

    sums: TreeSums
    total: torch.Tensor
    values: Sequence[torch.Tensor]
    sizes: Sequence[int] = ()  # of the chunks, by owner
    work: Work | None = None

    def result(self) -> torch.Tensor:
        if self.work is None:
            return self.total.copy_(self.sums.add(self.values))
        self.sums.add_all()
        self.work.wait()
        return self.total

    def when_complete(self, callback: Callable[[], object]) -> None:
        """Not called: the sum is complete only in `result`."""
