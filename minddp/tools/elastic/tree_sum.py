"""The sum of a bucket over all shares, in the order of the tree.

The gradients of all shares of a rank but the last are held. As soon as two neighbours in the tree are held, they
are added, as a binary counter carries. So for n shares at most 2 log2(n) + 2 sums are held at a time. The buckets
of the last share are launched in backward, as always.

Between ranks, each rank owns one chunk of each bucket. In a first exchange, which overlaps with backward, all
ranks send each owner its chunk of each of their sums, and the owner adds them in the tree's order. In a second
exchange the owners send their results to all ranks. If each rank has one sum, both send as many bytes as a ring
all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minddp.core.bucket import Bucket
from minddp.core.packing import Scaling
from minddp.core.reduction import PendingReduction
from minddp.tools.elastic.addition_tree import add_up, deal, sums_of
from minddp.transport.protocols import Transport, Work


class TreeReduceStrategy:
    """A `ReduceStrategy` that sums buckets over the shares instead of the ranks."""

    def __init__(self, transport: Transport, num_shares: int):
        self.transport = transport
        self._num_shares = num_shares
        sums = [sums_of(block, num_shares) for block in deal(num_shares, transport.world_size)]
        self._num_sums = [len(of_rank) for of_rank in sums]
        self._nodes = [node for of_rank in sums for node in of_rank]
        self.begin_step(0)

    def open(self) -> Scaling:
        return Scaling()

    def begin_step(self, first_share: int) -> None:
        self._held: list[list[torch.Tensor]] = []  # sums of shares: a gradient for each parameter
        self._first_share = self._next_share = first_share

    def hold(self, grads: list[torch.Tensor]) -> None:
        """Add the gradients of the next share to the held sums. Overwrites the gradients."""
        for _ in range(self._num_carries()):
            left = self._held.pop()
            torch._foreach_add_(left, grads)
            grads = left
        self._held.append(grads)
        self._next_share += 1

    def launch(self, bucket: Any, contents: torch.Tensor, *, is_last: bool) -> PendingReduction:
        assert isinstance(bucket, Bucket)
        assert contents is bucket.comm_buffer
        grads = [[held[slot.param] for slot in bucket.spec.slots] for held in self._held]
        for _ in range(self._num_carries()):
            torch._foreach_add_(bucket.views, grads.pop())
        parts = [torch.empty_like(contents) for _ in grads]
        for part, values in zip(parts, grads, strict=True):
            torch._foreach_copy_(bucket.views_into(part), values)
        return self._send_to_owners([*parts, contents])

    def _num_carries(self) -> int:
        """How many of the last held sums the tree adds to the next share."""
        block = range(self._first_share, self._next_share + 1)
        return len(self._held) + 1 - len(sums_of(block, self._num_shares))

    def _send_to_owners(self, parts: Sequence[torch.Tensor]) -> PendingTreeSum:
        """The first exchange of this rank's sums, flat and in order. The last one becomes the sum of all shares."""
        chunks_of_parts = [part.tensor_split(self.transport.world_size) for part in parts]
        sizes = list(map(len, chunks_of_parts[0]))
        own_size = sizes[self.transport.rank]
        received = parts[0].new_empty(sum(self._num_sums), own_size)
        by_owner = [chunk for chunks in zip(*chunks_of_parts, strict=True) for chunk in chunks]
        work = self.transport.all_to_all(
            received.view(-1),
            parts[0] if len(parts) == 1 else torch.cat(by_owner),
            [number * own_size for number in self._num_sums],
            [len(parts) * size for size in sizes],
        )
        return PendingTreeSum(self, parts[-1], received, sizes, work)

    def add(self, sums: torch.Tensor) -> torch.Tensor:
        """The scaled sum of the rows, which are this rank's chunk of all sums. Overwrites them."""
        total = add_up(dict(zip(self._nodes, sums, strict=True)), self._num_shares, torch.Tensor.add_)
        return total.mul_(1.0 / self._num_shares)


@dataclass(frozen=True, eq=False)
class PendingTreeSum:
    """A `PendingReduction`. When `work` is done, `received` has this rank's chunk of all sums."""

    strategy: TreeReduceStrategy
    total: torch.Tensor
    received: torch.Tensor
    sizes: Sequence[int]  # of the chunks, by owner
    work: Work

    def result(self) -> torch.Tensor:
        self.work.wait()
        own, num_owners = self.strategy.add(self.received), len(self.sizes)
        sizes_out = [len(own)] * num_owners
        self.strategy.transport.all_to_all(self.total, own.repeat(num_owners), self.sizes, sizes_out).wait()
        return self.total

    def when_complete(self, callback: Callable[[], object]) -> None:
        """Not called: the sum is complete only in `result`."""
