"""Buckets made by hand: parameters of all layouts with gradients, packed and unpacked without a reducer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minddp.core.bucket import Bucket, strides_of_gradient
from minddp.core.packing import LARGE_BYTES, Scaling
from minddp.core.plan import ParamSpec, plan_from_registration
from minddp.options import UNBOUNDED
from tests.fakes import FakeTransport

WORLD = 3  # x * (1 / 3) and x / 3 differ in bits for many x
COPIED = Scaling(WORLD)
RESIDENT = Scaling(WORLD, divide_resident=True)  # as with gradient_as_bucket_view
BATCHED = Scaling(WORLD, divide_all=True)  # as with batched_grad_copy
UNSCALED = Scaling()


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with the tensor's strides and a gradient in autograd's layout."""
    param = torch.nn.Parameter(tensor)
    param.grad = torch.randn_like(tensor, memory_format=torch.preserve_format)
    return param


def params_of_all_kinds(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Small and large, row-major, channels_last, transposed, 0-dim, empty."""
    numel_of_large = LARGE_BYTES // dtype.itemsize
    return [
        parameter(torch.randn(5, 3, dtype=dtype)),
        parameter(torch.randn(numel_of_large, dtype=dtype)),
        parameter(torch.randn(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)),
        parameter(torch.randn((), dtype=dtype)),
        parameter(torch.randn(0, 4, dtype=dtype)),
        parameter(torch.randn(7, 6, dtype=dtype).t()),
        parameter(torch.randn(300, numel_of_large // 200, dtype=dtype).t()),
    ]


def bucket_of(params: Sequence[torch.nn.Parameter], **options: Any) -> Bucket:
    """One bucket for all of them, in registration order. `options` are those of `Bucket`."""
    specs = [ParamSpec(f"p{i}", p.numel(), p.dtype, p.device) for i, p in enumerate(params)]
    [spec] = plan_from_registration(specs, [UNBOUNDED]).buckets
    in_order = [params[slot.param] for slot in spec.slots]
    names = [specs[slot.param].name for slot in spec.slots]
    strides = list(map(strides_of_gradient, in_order))
    return Bucket(spec, in_order, names, strides, FakeTransport().allocate, **options)


def pack(bucket: Bucket, scaling: Scaling) -> None:
    """All of the bucket, as in one backward."""
    bucket.begin_pass()
    for group in range(len(bucket.groups)):
        bucket.pack(group, scaling)


def grads_of(params: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [param.grad.clone() for param in params if param.grad is not None]


def share_memory(bucket: Bucket) -> list[bool]:
    """For each parameter, True if its gradient lies in the bucket."""
    pairs = zip(bucket.params, bucket.views, strict=True)
    return [param.grad is not None and param.grad.data_ptr() == view.data_ptr() for param, view in pairs]


def assert_same_bits(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype == b.dtype, index
        assert torch.equal(a, b), index
