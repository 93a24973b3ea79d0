"""Which rank sums which numbers.

[Note: shards follow parameters]
Each gradient is cut by itself: into blocks, and these into as many runs of equal length as there are ranks; rank r
sums the r-th. So the parameter alone decides which numbers share a block and which rank sums them, whatever its
bucket: a hook whose arithmetic goes by block, parameter or owner has the same bits with any bucket size, before and
after the rebuild. The last runs are filled up with zeros, on average half as many blocks as there are ranks.
"""

import functools
from collections.abc import Sequence

import torch
from torch.nn.functional import pad


def blocks_per_rank(numel: int, num_ranks: int, block: int) -> int:
    """How many blocks of a gradient each rank sums; `block` is their number of elements."""
    return -(-numel // (num_ranks * block))


def cut(gradients: Sequence[torch.Tensor], num_ranks: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """All of them as `[num_ranks, blocks, block]`, a copy. See [Note: shards follow parameters]."""
    runs = []
    for gradient in gradients:
        blocks = blocks_per_rank(gradient.numel(), num_ranks, block)
        flat = gradient.reshape(-1).to(dtype)
        runs.append(pad(flat, (0, num_ranks * blocks * block - flat.numel())).view(num_ranks, blocks, block))
    return torch.cat(runs, dim=1)


def joined(shards: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The reverse of `cut`: a tensor in the shape of each of `like`."""
    num_ranks, _, block = shards.shape
    widths = [blocks_per_rank(one.numel(), num_ranks, block) for one in like]
    runs = shards.split(widths, dim=1)
    return [run.reshape(-1)[: one.numel()].view(one.shape) for run, one in zip(runs, like, strict=True)]


def sum_in_rank_order(addends: torch.Tensor) -> torch.Tensor:
    """`[ranks, ...]` in, `[...]` out. One by one: in which order `torch.sum` adds depends on the shape."""
    return functools.reduce(torch.add, addends)
