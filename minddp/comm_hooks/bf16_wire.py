"""bfloat16 on the wire, sums in float32: half of the bytes, and each element is rounded twice whatever the ranks.

Torch's `bf16_compress_hook` needs NCCL, and sums in bfloat16, too: an element is rounded once more with each rank
of the ring. Here each rank adds up a shard in float32, rounds the mean once, and all gather the means: the bytes of
a ring. (Accumulating in float32 what was rounded to bfloat16: Kalamkar et al., "A Study of BFLOAT16 for Deep
Learning Training", 2019, arXiv 1905.12322.)
"""

import torch
import torch.distributed as dist

from minddp.comm_hooks.exchange import Exchange, check_bucket
from minddp.comm_hooks.shards import cut, joined, sum_in_rank_order

DTYPES = (torch.float32, torch.bfloat16)


def bf16_wire_hook(exchange: Exchange, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean of float32 or bfloat16 gradients: within 2**-8 of the largest addend, and equal on all ranks.

    Raises:
        TypeError: sparse gradients, or another dtype. In float16 there would be fewer bits on the wire than before.
    """
    check_bucket(bucket, "bf16_wire_hook", DTYPES)
    buffer = bucket.buffer()

    def reduce() -> None:
        # Rounding goes by element, so the bucket may be cut anywhere.
        shards = cut([buffer], exchange.size, 1, torch.bfloat16)
        total = sum_in_rank_order(exchange.all_to_all(shards).float())
        means = exchange.all_gather((total / exchange.size).bfloat16())
        buffer.copy_(joined(means, [buffer])[0])

    return exchange.run(buffer, reduce)
