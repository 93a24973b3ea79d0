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
from itertools import chain, pairwise
from typing import TypeVar

import torch

from minddp.core.bucket import Bucket
from minddp.core.packing import Scaling
from minddp.core.reduction import PendingReduction
from minddp.transport.protocols import Transport, Work

T = TypeVar("T")


def deal(num_shares: int, world_size: int) -> list[range]:
    """The shares of each rank: consecutive, and evenly distributed.

    Raises:
        ValueError: more ranks than shares.
    """
    if world_size > num_shares:
        raise ValueError(
            f"{num_shares} logical ranks cannot be dealt to {world_size} ranks: some would compute nothing. "
            f"Pass logical_ranks={world_size} or more, or start at most {num_shares} ranks."
        )
    bounds = [rank * num_shares // world_size for rank in range(world_size + 1)]
    return [range(first, stop) for first, stop in pairwise(bounds)]


def is_node(shares: range, num_shares: int) -> bool:
    """True if these shares have a sum in the tree, a perfect binary tree that is cut off at `num_shares`."""
    width = 1 << (len(shares) - 1).bit_length()
    return shares.start % width == 0 and (len(shares) == width or shares.stop == num_shares)


def append(sums: list[tuple[range, T]], shares: range, value: T, num_shares: int, add: Callable[[T, T], T]) -> None:
    """Append the sum of the next shares. As long as the last two sums are the children of a node, add them."""
    while sums and is_node(range(sums[-1][0].start, shares.stop), num_shares):
        left, sum_of_left = sums.pop()
        shares, value = range(left.start, shares.stop), add(sum_of_left, value)
    sums.append((shares, value))


class TreeReduceStrategy:
    """A `ReduceStrategy` that sums buckets over the shares instead of the ranks."""

    def __init__(self, transport: Transport, num_shares: int):
        self.transport = transport
        self.here = deal(num_shares, transport.world_size)[transport.rank]
        self._num_shares = num_shares
        self._nodes = [_nodes_of(block, num_shares) for block in deal(num_shares, transport.world_size)]
        self.held: list[tuple[range, list[torch.Tensor]]] = []  # sums of shares: a gradient for each parameter

    def begin_pass(self) -> Scaling:
        return Scaling()

    def hold(self, share: int, grads: list[torch.Tensor]) -> None:
        """Add the gradients of the next share to the held sums. Overwrites the gradients."""
        append(self.held, range(share, share + 1), grads, self._num_shares, _add_to_right)

    def launch(self, bucket: Bucket, contents: torch.Tensor, *, is_last: bool) -> PendingReduction:
        """`contents` are the gradients of this rank's last share. Begin the first exchange."""
        assert contents is bucket.comm_buffer
        sums = [(shares, [held[slot.param] for slot in bucket.spec.slots]) for shares, held in self.held]
        append(sums, self.here[-1:], bucket.views, self._num_shares, _add_to_right)
        parts = [torch.empty_like(contents) for _ in sums[:-1]]
        for part, (_, values) in zip(parts, sums, strict=False):
            torch._foreach_copy_(bucket.views_into(part), values)
        return self._send_to_owners([*parts, contents])

    def _send_to_owners(self, parts: Sequence[torch.Tensor]) -> PendingTreeSum:
        """The first exchange of this rank's sums, flat and in order. The last one becomes the sum of all shares."""
        chunks_of_parts = [part.tensor_split(self.transport.world_size) for part in parts]
        sizes = list(map(len, chunks_of_parts[0]))
        own_size = sizes[self.transport.rank]
        num_sums = list(map(len, self._nodes))
        received = parts[0].new_empty(sum(num_sums), own_size)
        by_owner = [chunk for chunks in zip(*chunks_of_parts, strict=True) for chunk in chunks]
        work = self.transport.all_to_all(
            received.view(-1),
            parts[0] if len(parts) == 1 else torch.cat(by_owner),
            [number * own_size for number in num_sums],
            [len(parts) * size for size in sizes],
        )
        return PendingTreeSum(self, parts[-1], received, sizes, work)

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        """The scaled sum of the rows, which are this rank's chunk of all sums. Overwrites them."""
        sums: list[tuple[range, torch.Tensor]] = []
        for shares, row in zip(chain(*self._nodes), rows, strict=True):
            append(sums, shares, row, self._num_shares, torch.Tensor.add_)
        return sums[0][1].mul_(1.0 / self._num_shares)


def _nodes_of(block: range, num_shares: int) -> list[range]:
    """The nodes of the tree whose sums a rank with these shares holds in the end."""
    sums: list[tuple[range, None]] = []
    for share in block:
        append(sums, range(share, share + 1), None, num_shares, lambda *_: None)
    return [shares for shares, _ in sums]


def _add_to_right(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_add_(right, left)
    return right


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
