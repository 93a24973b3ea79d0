"""Averages reach `.grad` without a copy where nobody can tell the difference.

[Note: handing gradients over]
When a backward ends, the averages lie in the buckets and the optimizer expects them in `.grad`. Torch copies
them over, one tensor at a time. minddp instead lets `.grad` *be* the bucket's memory, if that cannot be seen:
  - the old `.grad` was made by this very backward and nobody but the parameter refers to it, so nobody waits
    for the average to appear in it;
  - the new one begins at a multiple of `ALIGNMENT_BYTES`, as a fresh allocation would: kernels choose their
    order of summation by alignment, and a gradient norm must keep its bits.
Everything else is copied, as in torch; so is all of a model that may leave parameters unused, since a gradient
that no rank has used must stay as it is, and one that lies in a bucket would travel with it.

The other half of the promise is kept before the buffer is filled again: if anybody still looks at gradients
handed over earlier (a script that keeps them, a view, a detached copy), the bucket leaves that memory to them
and takes new memory for itself. So `.grad` behaves as if it had memory of its own; with
gradient_as_bucket_view=True, where the user asked for sharing, none of this is needed.

Who refers to a tensor is read off Python's reference counts and its storage's use count. What those are for a
tensor that nobody else holds depends on the version of torch, so it is measured, not assumed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

LARGEST_BYTES = 64 * 1024  # beyond, what the old gradients' memory costs to give back and to get again is more
ALIGNMENT_BYTES = 64  # what torch's CPU allocator gives a fresh tensor


def references(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Python's reference count of each tensor. Comparable only between sequences that nobody iterates over."""
    return [sys.getrefcount(tensor) for tensor in tensors]


def storage_references(tensor: torch.Tensor) -> int:
    """How many tensors share the memory of `tensor`, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


@dataclass(frozen=True)
class Unshared:
    """What `references` says of tensors that nobody else refers to.

    `grad` of one just read from a parameter's `.grad` for the first time; being some parameter's `.grad` adds
    `being_a_grad` to what a tensor had before.
    """

    grad: int
    being_a_grad: int

    @classmethod
    def measured(cls) -> Unshared:
        param = torch.nn.Parameter(torch.zeros(1))
        param.grad = torch.zeros(1)
        [grad] = references([param.grad])
        views = [torch.zeros(1)]
        [before] = references(views)
        param.grad = views[0]
        [after] = references(views)
        return cls(grad, after - before)


def may_be_handed_over(view: torch.Tensor) -> bool:
    """Whether it is small enough to be worth it, and could have such an address if it had its own memory."""
    return view.nbytes < LARGEST_BYTES and view.data_ptr() % ALIGNMENT_BYTES == 0
