"""The binary tree by which the gradients of all shares are added, and which rank computes which shares. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """The sum of the shares from `first` to `stop - 1`."""

    first: int
    stop: int

    @property
    def children(self) -> tuple[Node, Node]:
        """The left one has as many shares as the largest power of two that leaves some for the right one.

        So a left subtree is complete, and sums are finished in the order in which a binary counter carries.
        """
        num_left = 1 << (self.stop - self.first - 1).bit_length() - 1
        middle = self.first + num_left
        return Node(self.first, middle), Node(middle, self.stop)


def deal(num_shares: int, world_size: int) -> list[range]:
    """The shares of each rank: consecutive ones, as many on each rank as on another, or one more.

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
    """The fewest nodes of the tree that together are the shares of `block`, in order."""

    def within(node: Node) -> list[Node]:
        if node.first >= block.stop or node.stop <= block.start:
            return []
        if block.start <= node.first and node.stop <= block.stop:
            return [node]
        left, right = node.children
        return [*within(left), *within(right)]

    return within(Node(0, num_shares))


def carries(held: Sequence[Node], share: int, num_shares: int) -> int:
    """How many of the last sums `held` are merged with that of the next `share`, the last one first."""
    wanted = sums_of(range(held[0].first if held else share, share + 1), num_shares)
    return len(held) + 1 - len(wanted)


def steps_between(nodes: Sequence[Node], num_shares: int) -> tuple[tuple[int, int], ...]:
    """The additions that make the root of `nodes`, which cover all shares in order: (place of left, of right)."""
    steps: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        steps.append((left, right))
        return left

    add_up({node: place for place, node in enumerate(nodes)}, num_shares, add)
    return tuple(steps)


def add_up(sums: Mapping[Node, T], num_shares: int, add: Callable[[T, T], T]) -> T:
    """The sum of all shares, from any `sums` that cover them. `add(left, right)` may reuse its operands."""

    def value(node: Node) -> T:
        if node in sums:
            return sums[node]
        left, right = node.children
        return add(value(left), value(right))

    return value(Node(0, num_shares))
