"""Adasum: a combination of gradients between their mean and their sum.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, arXiv 2006.02924. For two gradients,

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

so each loses half of its projection on the other: equal gradients become their mean, orthogonal ones their sum.
More gradients are combined in a tree: neighbours first, then the results; with an odd number, the last one moves up
to the next level. Dot products are taken per parameter, as in the paper, in float64.

The paper halves vectors between pairs of ranks at each level. Here every rank gets its shard of all gradients at
once, which is as many bytes. Each level gathers only dot products, and the end gathers the results. With Adam and
LAMB the paper combines the steps of the ranks' optimizers. A hook only has gradients, so it suits optimizers whose
step is linear in them, such as SGD with momentum.
"""

import torch
import torch.distributed as dist

from minddp.comm_hooks.hook_collectives import HookCollectives, check_bucket
from minddp.comm_hooks.shards import blocks_per_rank, cut, reassemble, sum_in_rank_order

DTYPES = (torch.float32, torch.float64)
Pair = tuple[torch.Tensor, torch.Tensor]


def adasum_hook(collectives: HookCollectives, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Adasum instead of the mean; equal on all ranks, and the same in any buckets.

    Raises:
        TypeError: sparse gradients, or another dtype than float32 and float64.
    """
    check_bucket(bucket, "adasum_hook", DTYPES)
    buffer, gradients = bucket.buffer(), bucket.gradients()

    def reduce() -> None:
        widths = [blocks_per_rank(gradient.numel(), collectives.size, 1) for gradient in gradients]
        shards = collectives.all_to_all(cut(gradients, collectives.size, 1, buffer.dtype))
        vectors = list(shards.squeeze(-1))  # this rank's shard of each rank's gradients, each `[elements]`
        while len(vectors) > 1:
            pairs, rest = list(zip(vectors[::2], vectors[1::2], strict=False)), vectors[len(vectors) // 2 * 2 :]
            dots = collectives.all_gather(torch.stack([_dots(pair, widths) for pair in pairs]))
            vectors = [_combined(*each, widths) for each in zip(pairs, sum_in_rank_order(dots), strict=True)] + rest
        sums = collectives.all_gather(vectors[0].unsqueeze(-1))
        for gradient, combined in zip(gradients, reassemble(sums, gradients), strict=True):
            gradient.copy_(combined)

    return collectives.run(buffer, reduce)


def _dots(pair: Pair, widths: list[int]) -> torch.Tensor:
    """a.b, a.a and b.b of each parameter's part of two shards: `[parameters, 3]` float64."""
    a, b = (vector.double() for vector in pair)
    parts = ((x * y).split(widths) for x, y in ((a, b), (a, a), (b, b)))
    # Cloned, because the order of a sum may depend on the part's alignment, and so on the bucket.
    return torch.stack([torch.stack([part.clone().sum() for part in products]) for products in parts], dim=1)


def _combined(pair: Pair, dots: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """The adasum of two vectors, parameter by parameter. A zero vector has the weight 1."""
    a_b, squares = dots[:, :1], dots[:, 1:]
    weights = torch.where(squares == 0, 1.0, 1 - a_b / (2 * squares)).to(pair[0].dtype)
    parts = [weights[place].expand(width, 2) for place, width in enumerate(widths)]
    a, b = (vector * weight for vector, weight in zip(pair, torch.cat(parts).T, strict=True))
    return a.add_(b)
