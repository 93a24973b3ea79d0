"""Gradients travel as bfloat16 and are summed in float32: half the bytes, two roundings on any number of ranks.

Torch's `bf16_compress_hook` needs NCCL and sums in bfloat16, so each rank of the ring rounds once more. Here each
rank sums its shard in float32 and rounds the mean once, as in Kalamkar et al., "A Study of BFLOAT16 for Deep
Learning Training", 2019, arXiv 1905.12322. It sends as many elements as a ring.
"""

import torch
import torch.distributed as dist

from minddp.comm_hooks.hook_collectives import HookCollectives, check_bucket
from minddp.comm_hooks.shards import cut, reassemble, sum_in_rank_order

DTYPES = (torch.float32, torch.bfloat16)  # float16 would lose mantissa and save no bytes


def bf16_compression_hook(
    collectives: HookCollectives, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean, within 2**-8 of the largest addend and equal on all ranks.

    Raises:
        TypeError: sparse gradients, or another dtype than float32 and bfloat16.
    """
    check_bucket(bucket, "bf16_compression_hook", DTYPES)
    buffer = bucket.buffer()

    def reduce() -> None:
        # Each element is rounded by itself, so the shards may ignore the borders of parameters.
        shards = cut([buffer], collectives.size, 1, torch.bfloat16)
        total = sum_in_rank_order(collectives.all_to_all(shards).float())
        means = collectives.all_gather((total / collectives.size).bfloat16())
        buffer.copy_(reassemble(means, [buffer])[0])

    return collectives.run(buffer, reduce)
