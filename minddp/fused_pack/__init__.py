r"""On a GPU: many gradients into one bucket, scaled and cast, by one kernel and one pass over memory; and back.

A bucket of a model with many small parameters costs torch's DDP a kernel launch for each of them. Launches are what
such a step consists of. Here one kernel does the same for hundreds of gradients at a time:

    chunks.py    cuts the gradients into *chunks* of equal size: one block of threads moves one chunk
    kernel.py    what a block does: read 16 bytes a thread where it can, convert, scale, write
    packer.py    which bucket gets one, and how it is launched

[Note: the table of addresses]
Where each chunk belongs in the bucket is known when the bucket is made, and uploaded then. Where the gradients lie
is only known in each pass, since autograd allocates them anew. Their addresses travel *in the launch*, as an
argument by value. So nothing is copied to the device in a step, nothing has to live on until the kernel has run,
and a CUDA graph that captures the launch holds the addresses, too. An argument list has room for 4 KiB, which is
what limits a launch to `TENSORS_PER_LAUNCH` gradients.

[Note: the same bits as without]
The kernel computes what torch's kernels compute: a gradient is first rounded to the bucket's dtype if that is
another one, and then multiplied in float32 (float64 for float64) by the factor, and rounded once more. Torch
divides a tensor on a GPU by a number by multiplying with its inverse, taken in that same precision; so does
`factor_of`.
"""

from minddp.fused_pack.packer import FusedPack, fused_pack_is_wanted, fused_pack_of

__all__ = ["FusedPack", "fused_pack_is_wanted", "fused_pack_of"]
