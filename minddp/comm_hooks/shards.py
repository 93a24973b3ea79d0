"""Cutting gradients into shards: which rank sums which elements.

Each gradient is cut by itself, into blocks, and the blocks into one run of equal length per rank; rank r sums run
r. So the parameter alone decides which elements share a block and which rank sums them, and the bits are the same
in any buckets, before and after the rebuild. The last runs are padded with zeros.
"""

import functools
from collections.abc import Sequence

import torch
from torch.nn.functional import pad


def blocks_per_rank(numel: int, num_ranks: int, block: int) -> int:
    """The number of blocks, of `block` elements, that each rank sums of a gradient of `numel` elements."""
    return -(-numel // (num_ranks * block))


def cut(gradients: Sequence[torch.Tensor], num_ranks: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """A copy of all gradients, as `[num_ranks, blocks, block]`."""
    runs = []
    for gradient in gradients:
        blocks = blocks_per_rank(gradient.numel(), num_ranks, block)
        flat = gradient.reshape(-1).to(dtype)
        runs.append(pad(flat, (0, num_ranks * blocks * block - flat.numel())).view(num_ranks, blocks, block))
    return torch.cat(runs, dim=1)


def reassemble(shards: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `cut`: tensors with the shapes of `like`."""
    num_ranks, _, block = shards.shape
    widths = [blocks_per_rank(one.numel(), num_ranks, block) for one in like]
    runs = shards.split(widths, dim=1)
    return [run.reshape(-1)[: one.numel()].view(one.shape) for run, one in zip(runs, like, strict=True)]


def sum_in_rank_order(addends: torch.Tensor) -> torch.Tensor:
    """`[ranks, ...]` in, `[...]` out. `torch.sum` adds in an order that depends on the shape."""
    return functools.reduce(torch.add, addends)
