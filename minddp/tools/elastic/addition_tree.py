"""The binary tree that determines the order in which gradients are added, and the shares of each rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


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


def additions(nodes: Sequence[Node], num_shares: int) -> tuple[tuple[int, int], ...]:
    """The additions (place of left, place of right) by which place 0 of `nodes` becomes the sum of all shares."""
    places = {node: place for place, node in enumerate(nodes)}
    steps: list[tuple[int, int]] = []

    def sum_up(node: Node) -> int:
        if node in places:
            return places[node]
        left, right = map(sum_up, node.children)
        steps.append((left, right))
        return left

    sum_up(Node(0, num_shares))
    return tuple(steps)
