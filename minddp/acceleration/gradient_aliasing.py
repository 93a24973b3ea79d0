"""Averages reach `.grad` without a copy where nobody can tell the difference.

[Note: handing gradients over]
When a backward ends, the averages lie in the buckets and the optimizer expects them in `.grad`. Torch copies
them over, one tensor at a time. minddp instead lets the `.grad` of a large parameter *be* the bucket's memory, if
that cannot be seen:
  - no parameter had a gradient when this backward began, so it has made them all;
  - nobody but the parameter refers to the gradient or its memory, so nobody waits for the average to appear there;
  - the view begins at a multiple of `ALIGNMENT_BYTES`, as a fresh allocation would: kernels choose their order of
    summation by alignment, and a gradient norm must keep its bits;
  - the strides are the same.
Everything else is copied, as in torch: small gradients, since looking who refers to them takes as long; all of a
model that may leave parameters unused, since a gradient that no rank has used must stay as it is, and one that lies
in a bucket would travel with it; and all on a GPU, where another stream may still be reading what nobody refers to
any more (`Tensor.record_stream`).

The other half of the promise is kept before the buffer is filled again: if anybody still looks at gradients
handed over earlier (a script that keeps them, a view, a detached copy), the bucket leaves that memory to them,
takes new memory for itself, and hands nothing over again: who keeps one gradient keeps all of the bucket. So
`.grad` behaves as if it had memory of its own. With gradient_as_bucket_view=True, where the user asked for sharing,
none of this is needed.

Why not sooner, as soon as a gradient has been packed? Its memory could serve the next one. But other hooks, and
another wrapper that shares the parameter, may look at it until backward ends; and until then the engine itself
refers to what has just arrived.

Who refers to a tensor is read off Python's reference counts and those of torch. What they are for a tensor that
nobody else holds depends on the version of torch, so it is measured, not assumed.
"""

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

import torch

SMALLEST_BYTES = 64 * 1024
ALIGNMENT_BYTES = 64  # what torch's CPU allocator gives a fresh tensor


class MemoryReferences(NamedTuple):
    """Who refers to a tensor's memory: tensors, itself included, and Python's references to the storage."""

    tensors: int
    to_storage: int


def references_to_memory(tensor: torch.Tensor) -> MemoryReferences:
    storage = tensor.untyped_storage()
    return MemoryReferences(torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage))


def is_held_by_parameter_alone(param: torch.nn.Parameter) -> bool:
    """Whether nobody else refers to `.grad` or to its memory. There is one, and it is strided."""
    return _references_to_grad(param) == _references_if_alone()


def _references_to_grad(param: torch.nn.Parameter) -> tuple[int, int, MemoryReferences]:
    grad = param.grad
    assert grad is not None
    return sys.getrefcount(grad), grad._use_count(), references_to_memory(grad)  # type: ignore[attr-defined]


@functools.cache
def _references_if_alone() -> tuple[int, int, MemoryReferences]:
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    return _references_to_grad(param)


def may_be_handed_over(view: torch.Tensor) -> bool:
    """Whether that is worth it, its address could be that of a fresh tensor, and nobody reads it unseen."""
    is_worth_it = view.nbytes >= SMALLEST_BYTES
    return is_worth_it and view.device.type == "cpu" and view.data_ptr() % ALIGNMENT_BYTES == 0
