"""Averages reach `.grad` without a copy where nobody can tell the difference.

[Note: handing gradients over]
When a backward ends, the averages lie in the buckets and the optimizer expects them in `.grad`. Torch copies
them over, one tensor at a time. minddp instead lets `.grad` *be* the bucket's memory, as soon as the gradient has
been packed, if that cannot be seen:
  - no parameter had a gradient when this backward began, so it has made them all;
  - nobody but the parameter refers to the gradient, so nobody waits for the average to appear in it;
  - the view begins at a multiple of `ALIGNMENT_BYTES`, as a fresh allocation would: kernels choose their order of
    summation by alignment, and a gradient norm must keep its bits.
That saves writing and reading all gradients once more; and what a gradient took is given back at once, for the next
gradient to take. With torch's defaults all gradients exist twice when backward ends, here once.
Everything else is copied, as in torch. So is all of a model that may leave parameters unused, since a gradient that
no rank has used must stay as it is, and one that lies in a bucket would travel with it; and all on a GPU, where
another stream may still be reading what nobody refers to any more (`Tensor.record_stream`).
What remains to be seen is seen within a backward only: a hook that looks at the `.grad` of *another* parameter may
find it scaled already, or averaged, where torch's still has what this rank has computed.

The other half of the promise is kept before the buffer is filled again: if anybody still looks at gradients
handed over earlier (a script that keeps them, a view, a detached copy), the bucket leaves that memory to them
and takes new memory for itself. So `.grad` behaves as if it had memory of its own; with
gradient_as_bucket_view=True, where the user asked for sharing, none of this is needed.

Who refers to a tensor is read off Python's reference counts and its storage's use count. What those are for a
tensor that nobody else holds depends on the version of torch, so it is measured, not assumed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch

ALIGNMENT_BYTES = 64  # what torch's CPU allocator gives a fresh tensor


def references(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Python's reference count of each tensor. Comparable only between sequences that nobody iterates over."""
    return [sys.getrefcount(tensor) for tensor in tensors]


def storage_references(tensor: torch.Tensor) -> int:
    """How many tensors share the memory of `tensor`, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


@functools.cache
def count_if_unseen() -> int:
    """What `references` says of gradients in a list, each also some parameter's `.grad` and nobody else's."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    grads = [param.grad]
    [count] = references(grads)
    return count


@functools.cache
def count_added_by_grad() -> int:
    """By how much being some parameter's `.grad` increases what `references` says of a tensor."""
    param = torch.nn.Parameter(torch.zeros(1))
    tensors = [torch.zeros(1)]
    [before] = references(tensors)
    param.grad = tensors[0]
    [after] = references(tensors)
    return after - before


def may_be_handed_over(view: torch.Tensor) -> bool:
    """Whether it could have such an address if it had memory of its own, and nobody reads it unseen."""
    return view.device.type == "cpu" and view.data_ptr() % ALIGNMENT_BYTES == 0
