"""Averages reach `.grad` without a copy if no script can notice.

[Note: gradient aliasing]
When a backward ends, the averages are in the buckets and the optimizer expects them in `.grad`. Torch copies them,
one tensor at a time. minddp lets the `.grad` of a large parameter share the bucket's memory instead, if
  - the parameter had no gradient when this backward began, so this backward has created it;
  - nothing but the parameter refers to the gradient or its memory, so no other tensor would get the average;
  - the view begins at a multiple of `ALIGNMENT_BYTES`, as a fresh allocation would: kernels choose their order of
    summation by alignment, and a gradient norm must keep its bits;
  - the strides are the same;
  - backward does not create a graph (`create_graph=True`).
Everything else is copied, as in torch: small gradients, since the check takes as long as the copy, and gradients on
a GPU, where another stream may still read memory without references (`Tensor.record_stream`). Nor is aliasing used
with find_unused_parameters: a gradient that no rank has used must not change, but in a bucket it would be reduced.

Before the buffer is filled again, `.grad` must be independent of it. If anything still refers to gradients aliased
earlier (a script that keeps them, a view, a detached copy, or `.grad` itself, which was not set to `None` and to
which this backward adds), the bucket leaves its memory to them, allocates new memory, and never aliases again. So
packing, which scales in the buffer, never changes `.grad`.

Aliasing while packing would save memory. But until backward ends other hooks, or another wrapper that shares the
parameter, may read the gradient, and the engine itself still refers to a gradient that has just arrived.

References to a tensor are read from the reference counts of Python and torch. Their values for a tensor without
further references depend on the version of torch, so they are measured.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch

from minddp.core import autograd
from minddp.core.bucket import Bucket, view_of
from minddp.core.mode import Mode
from minddp.platform import streams

SMALLEST_BYTES = 64 * 1024
ALIGNMENT_BYTES = 64  # what torch's CPU allocator gives a fresh tensor


class GradientAliasing(Mode):
    """Knows which parameters of a wrapper get their first gradient in the running backward."""

    def __init__(self, params: Sequence[torch.nn.Parameter]):
        self._large = [param for param in params if _is_worth_it(param)]
        self._backward = -1
        self.without_grad: set[torch.nn.Parameter] = set()  # when this backward began

    def backward_begins(self) -> None:
        self._backward = autograd.current_backward()
        self.without_grad = {param for param in self._large if param.grad is None}

    def first_gradient(self, param: int) -> None:
        creates_graph = torch.is_grad_enabled()
        if creates_graph or autograd.current_backward() != self._backward:
            self.without_grad = set()

    def post_backward(self) -> None:
        self.without_grad = set()


class BucketAliasing:
    """The aliases of one bucket's current memory. See [Note: gradient aliasing]."""

    def __init__(self, owner: GradientAliasing, bucket: Bucket):
        self._owner = owner
        self._params = bucket.params
        self._slots = bucket.spec.slots
        self._flat = bucket.flat
        self._views = bucket.views
        self._may_be_aliased = [
            _is_worth_it(view) and view.data_ptr() % ALIGNMENT_BYTES == 0 for view in bucket.views
        ]
        self._aliased = False
        self._references_of_ours = references_to_memory(bucket.flat)

    def alias(self, places: list[int]) -> list[int]:
        """Let gradients share the bucket's memory if no reference notices. Returns the other `places`."""
        return [k for k in places if not (self._may_be_aliased[k] and self._alias(k))]

    def _alias(self, k: int) -> bool:
        """The gradient is a separate tensor: in-place changes by the script must not reach the bucket's view."""
        param, view = self._params[k], self._views[k]
        if param not in self._owner.without_grad or param.grad is None:
            return False
        if param.grad.stride() != view.stride() or not is_held_by_parameter_alone(param):
            return False
        param.grad = view_of(self._flat, self._slots[k], view)
        self._aliased = True
        return True

    def memory_is_held(self) -> bool:
        """True if something, perhaps a `.grad`, still refers to memory that was shared, or has freed it."""
        if not self._aliased:
            return False
        is_freed = self._flat.untyped_storage().nbytes() < self._flat.nbytes  # by `resize_`
        return is_freed or references_to_memory(self._flat) != self._references_of_ours


def references_to_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """How many tensors, including this one, and how many Python objects refer to the tensor's storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def is_held_by_parameter_alone(param: torch.nn.Parameter) -> bool:
    """True if nothing else refers to `.grad`, which exists and is strided, or to its memory."""
    return _references_to_grad(param) == _references_if_alone()


def _references_to_grad(param: torch.nn.Parameter) -> tuple[object, ...]:
    grad = param.grad
    assert grad is not None
    return sys.getrefcount(grad), grad._use_count(), references_to_memory(grad)  # type: ignore[attr-defined]


@functools.cache
def _references_if_alone() -> tuple[object, ...]:
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    return _references_to_grad(param)


def _is_worth_it(tensor: torch.Tensor) -> bool:
    return tensor.nbytes >= SMALLEST_BYTES and not streams.has_streams(tensor.device)
