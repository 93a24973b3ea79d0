"""Adasum: another sum of gradients, between their mean, where they point the same way, and their sum.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, arXiv 2006.02924. Of two gradients,

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

each gives up half of its projection on the other: equal ones become their mean, orthogonal ones their sum. Of more,
neighbours are combined, then the results, as a tree; of an odd number the last one waits for the next level. Dot
products are those of one parameter at a time, as in the paper, in float64.

The paper halves vectors between pairs of ranks at each level. Here every rank gets its shard of all gradients at
once, which is as many bytes; at each level only dot products are gathered, and at the end the results. The paper
gives Adam and LAMB the gradients of one rank, and combines the steps that they take. A hook has only gradients, so
it suits optimizers whose step is linear in them, such as SGD with momentum.
"""

import torch
import torch.distributed as dist

from minddp.comm_hooks.exchange import Exchange, check_bucket
from minddp.comm_hooks.shards import blocks_per_rank, cut, joined, sum_in_rank_order

DTYPES = (torch.float32, torch.float64)
Pair = tuple[torch.Tensor, torch.Tensor]


def adasum_hook(exchange: Exchange, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Adasum instead of the mean, of float32 or float64 gradients; equal on all ranks, whatever the buckets.

    Raises:
        TypeError: sparse gradients, or another dtype.
    """
    check_bucket(bucket, "adasum_hook", DTYPES)
    buffer, gradients = bucket.buffer(), bucket.gradients()

    def reduce() -> None:
        widths = [blocks_per_rank(gradient.numel(), exchange.size, 1) for gradient in gradients]
        shards = exchange.all_to_all(cut(gradients, exchange.size, 1, buffer.dtype))
        vectors = list(shards.squeeze(-1))  # this rank's shard of each rank's gradients, `[numbers]`
        while len(vectors) > 1:
            pairs, rest = list(zip(vectors[::2], vectors[1::2], strict=False)), vectors[len(vectors) // 2 * 2 :]
            dots = exchange.all_gather(torch.stack([_dots(pair, widths) for pair in pairs]))
            vectors = [_combined(*each, widths) for each in zip(pairs, sum_in_rank_order(dots), strict=True)] + rest
        sums = exchange.all_gather(vectors[0].unsqueeze(-1))
        for gradient, combined in zip(gradients, joined(sums, gradients), strict=True):
            gradient.copy_(combined)

    return exchange.run(buffer, reduce)


def _dots(pair: Pair, widths: list[int]) -> torch.Tensor:
    """a.b, a.a and b.b of each parameter's part of two shards: `[parameters, 3]` float64."""
    a, b = (vector.double() for vector in pair)
    parts = ((x * y).split(widths) for x, y in ((a, b), (a, a), (b, b)))
    # Cloned: the order in which a sum adds may depend on where the part lies in memory, and so on the bucket.
    return torch.stack([torch.stack([part.clone().sum() for part in products]) for products in parts], dim=1)


def _combined(pair: Pair, dots: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """The adasum of two vectors, parameter by parameter; zero has no direction, and adds nothing."""
    a_b, squares = dots[:, :1], dots[:, 1:]
    weights = torch.where(squares == 0, 1.0, 1 - a_b / (2 * squares)).to(pair[0].dtype)
    parts = [weights[place].expand(width, 2) for place, width in enumerate(widths)]
    a, b = (vector * weight for vector, weight in zip(pair, torch.cat(parts).T, strict=True))
    return a.add_(b)
