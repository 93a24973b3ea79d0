"""The binary tree that determines the order in which gradients are added, and the shares of each rank. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """The sum of the shares from `first` to `stop - 1`."""

    first: int
    stop: int

    @property
    def children(self) -> tuple[Node, Node]:
        """The left one has the largest power of two of shares that leaves some for the right one.

        So every left subtree is complete, and sums are completed in the order in which a binary counter carries.
        """
        num_left = 1 << (self.stop - self.first - 1).bit_length() - 1
        middle = self.first + num_left
        return Node(self.first, middle), Node(middle, self.stop)


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


def sums_of(block: range, num_shares: int) -> list[Node]:
    """The smallest set of nodes of the tree that covers the shares of `block`, in order."""

    def within(node: Node) -> list[Node]:
        if node.first >= block.stop or node.stop <= block.start:
            return []
        if block.start <= node.first and node.stop <= block.stop:
            return [node]
        left, right = node.children
        return [*within(left), *within(right)]

    return within(Node(0, num_shares))


def add_up(sums: Mapping[Node, T], num_shares: int, add: Callable[[T, T], T]) -> T:
    """The sum of all shares, added in the order of the tree from the sums of nodes that cover them."""

    def total(node: Node) -> T:
        if node in sums:
            return sums[node]
        left, right = node.children
        return add(total(left), total(right))

    return total(Node(0, num_shares))
