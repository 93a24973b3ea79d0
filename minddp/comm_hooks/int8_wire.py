"""8 bits on the wire, one scale for each 128 elements, sums in float32: 0.26 of the bytes. With error feedback.

Each rank rounds its gradient and sends every rank a shard; that adds up in float32, rounds the sum once, and all
gather the sums. Both roundings are compensated: each rank keeps what its own rounding has lost, and the rank that
rounded a sum also what that has lost, and adds it to its own gradient in the next step (Tang et al.,
"DoubleSqueeze", 2019, arXiv 1905.05957, algorithm 1, where a server sums). One scale per block, so that a large
element costs precision only to its neighbours: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning",
2015, arXiv 1511.04561.

[Note: why int8]
The other 8-bit format, float8_e4m3fn, has 3 bits of mantissa: its error is up to 1/16 of each element, also of the
largest, which make up a gradient's norm; that of int8 is at most 1/254 of a block's largest element. On normally
distributed gradients int8 loses a quarter as much, by the root mean square (a test computes both). Small elements
beside a large one, which int8 rounds to zero, are sent later by error feedback.
"""

import torch
import torch.distributed as dist

from minddp.comm_hooks.error_feedback import ErrorFeedback
from minddp.comm_hooks.exchange import check_bucket
from minddp.comm_hooks.shards import cut, joined, sum_in_rank_order

BLOCK = 128
LARGEST = 127
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def int8_wire_hook(state: ErrorFeedback, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of float32, bfloat16 or float16 gradients, rounded twice; equal on all ranks, whatever the buckets.

    Raises:
        TypeError: sparse gradients, or another dtype.
    """
    check_bucket(bucket, "int8_wire_hook", DTYPES)
    gradients, params = bucket.gradients(), bucket.parameters()

    def reduce() -> None:
        due = cut(gradients, state.size, BLOCK, torch.float32)
        due += cut(state.errors_of(params), state.size, BLOCK, torch.float32)
        codes = encode(due)
        errors = due.sub_(decode(codes))
        total = sum_in_rank_order(decode(state.all_to_all(codes)))
        codes_of_total = encode(total)
        errors[state.rank] += total.sub_(decode(codes_of_total))
        state.keep(params, joined(errors, params))
        means = decode(state.all_gather(codes_of_total)).div_(state.size)
        for gradient, mean in zip(gradients, joined(means, params), strict=True):
            gradient.copy_(mean)

    return state.run(bucket.buffer(), reduce)


def encode(values: torch.Tensor) -> torch.Tensor:
    """`[..., BLOCK]` float32 in; `[..., 4 + BLOCK]` uint8 out: the scale of a block, then its rounded elements."""
    scale = values.abs().amax(dim=-1, keepdim=True).div_(LARGEST)  # NaN if there is one
    steps = (values / scale).round_().nan_to_num_(0.0).clamp_(-LARGEST, LARGEST)  # 0 / 0 where all are zero
    return torch.cat([scale.view(torch.uint8), steps.to(torch.int8).view(torch.uint8)], dim=-1)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """The reverse of `encode`, but for the rounding. A block with NaN or infinity has no finite element."""
    scale = codes[..., :4].contiguous().view(torch.float32)
    return codes[..., 4:].view(torch.int8).float().mul_(scale)
