"""Gradients travel as 8-bit integers, with one scale for each 128 elements: 0.26 of the bytes, sums in float32.

Each rank rounds its gradient and sends one shard to every rank. Each rank sums its shard in float32, rounds the sum
and sends it to all. Error feedback compensates both roundings: each rank adds its own rounding error to its
gradient in the next step, and the rank that rounded a sum also adds the error of that sum (Tang et al.,
"DoubleSqueeze", 2019, arXiv 1905.05957, algorithm 1, with the ranks as servers). One scale per block limits the
effect of a large element to its neighbours: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning",
2015, arXiv 1511.04561.

On normally distributed gradients the error of int8 is a quarter of that of float8_e4m3fn (a test computes both).
"""

import torch
import torch.distributed as dist

from minddp.comm_hooks.error_feedback import ErrorFeedback
from minddp.comm_hooks.hook_collectives import check_bucket
from minddp.comm_hooks.shards import cut, reassemble, sum_in_rank_order

BLOCK = 128
LARGEST = 127
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def int8_compression_hook(state: ErrorFeedback, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean, rounded twice; equal on all ranks, and the same in any buckets.

    Raises:
        TypeError: sparse gradients, or another dtype than float32, bfloat16 and float16.
    """
    check_bucket(bucket, "int8_compression_hook", DTYPES)
    gradients, params = bucket.gradients(), bucket.parameters()

    def reduce() -> None:
        due = cut(gradients, state.size, BLOCK, torch.float32)
        due += cut(state.errors_of(params), state.size, BLOCK, torch.float32)
        codes = encode(due)
        errors = due.sub_(decode(codes))
        total = sum_in_rank_order(decode(state.all_to_all(codes)))
        codes_of_total = encode(total)
        errors[state.rank] += total.sub_(decode(codes_of_total))
        state.keep(params, reassemble(errors, params))
        means = decode(state.all_gather(codes_of_total)).div_(state.size)
        for gradient, mean in zip(gradients, reassemble(means, params), strict=True):
            gradient.copy_(mean)

    return state.run(bucket.buffer(), reduce)


def encode(values: torch.Tensor) -> torch.Tensor:
    """`[..., BLOCK]` float32 in; `[..., 4 + BLOCK]` uint8 out: the scale of a block, then its rounded elements."""
    scale = values.abs().amax(dim=-1, keepdim=True).div_(LARGEST)  # NaN if the block has one
    steps = (values / scale).round_().nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)  # 0 / 0 in a block of zeros
    return torch.cat([scale.view(torch.uint8), steps.to(torch.int8).view(torch.uint8)], dim=-1)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `encode`, up to rounding. A block with NaN or infinity has no finite element."""
    scale = codes[..., :4].contiguous().view(torch.float32)
    return codes[..., 4:].view(torch.int8).float().mul_(scale)
