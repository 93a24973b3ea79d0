"""One bucket: views in the parameters' layout, and [Note: how averages reach gradients]."""

from __future__ import annotations

import pytest
import torch

from tests.buckets import (
    COPIED,
    RESIDENT,
    UNSCALED,
    WORLD,
    assert_same_bits,
    bucket_of,
    grads_of,
    pack,
    parameter,
    params_of_all_kinds,
    share_memory,
)


def test_views_have_the_parameters_strides_where_those_are_dense() -> None:
    params = params_of_all_kinds()
    with_gaps = torch.nn.Parameter(torch.randn(4, 6)[:, ::2])
    bucket = bucket_of([*params, with_gaps])
    assert [view.stride() for view in bucket.views] == [param.stride() for param in params] + [(3, 1)]


def test_views_lie_one_after_the_other_and_fill_the_buffer() -> None:
    bucket = bucket_of([parameter(torch.randn(size)) for size in (3, 1, 5)])
    offsets = [view.storage_offset() for view in bucket.views]
    assert (offsets, bucket.flat.numel()) == ([0, 3, 4], 9)
    assert all(not view._is_view() for view in bucket.views), "a view of `flat` could not be detached in place"


def test_complex_numbers_travel_as_pairs_of_real_ones() -> None:
    params = [parameter(torch.randn(2, 3, dtype=torch.complex64))]
    bucket = bucket_of(params)
    assert (bucket.flat.dtype, bucket.comm_buffer.dtype, bucket.comm_buffer.numel()) == (
        torch.complex64,
        torch.float32,
        12,
    )
    pack(bucket, UNSCALED)
    average = torch.randn_like(bucket.comm_buffer)
    bucket.unpack(average)
    assert torch.equal(torch.view_as_real(params[0].grad).flatten(), average)


def test_gradients_may_travel_in_another_dtype() -> None:
    params = [parameter(torch.randn(4))]
    before = grads_of(params)
    bucket = bucket_of(params, grad_dtype=torch.float32, reduce_dtype=torch.bfloat16)
    pack(bucket, UNSCALED)
    assert_same_bits(bucket.views, [before[0].bfloat16()])
    bucket.unpack(bucket.comm_buffer)
    assert_same_bits(grads_of(params), [before[0].bfloat16().float()])


# ------------------------------------------------------------------ copied


def test_averages_are_copied_into_the_gradients_that_exist() -> None:
    """The optimizer, or a script, may keep references to them."""
    params = params_of_all_kinds()
    grads = [param.grad for param in params]
    bucket = bucket_of(params)
    pack(bucket, COPIED)
    bucket.flat.mul_(WORLD)
    bucket.unpack(bucket.comm_buffer)
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    assert_same_bits(grads_of(params), bucket.views)
    assert not any(share_memory(bucket)[:2])


@pytest.mark.parametrize("views", [False, True])
def test_a_parameter_without_gradient_gets_one_of_its_own_layout(views: bool) -> None:
    params = params_of_all_kinds()
    for param in params:
        param.grad = None
    bucket = bucket_of(params, grads_are_views=views)
    pack(bucket, RESIDENT)
    bucket.flat.copy_(torch.randn_like(bucket.flat))
    bucket.unpack(bucket.comm_buffer)
    assert_same_bits(grads_of(params), bucket.views)
    assert [param.grad.stride() for param in params] == [param.stride() for param in params]
    assert share_memory(bucket)[0] == views


def test_a_parameter_with_gaps_gets_a_gradient_without_them() -> None:
    param = torch.nn.Parameter(torch.randn(4, 6)[:, ::2])
    bucket = bucket_of([param])
    pack(bucket, COPIED)
    bucket.unpack(torch.arange(12.0))
    assert param.grad.stride() == (3, 1)
    assert torch.equal(param.grad.flatten(), torch.arange(12.0))


@pytest.mark.parametrize("views", [False, True])
def test_an_average_may_lie_elsewhere(views: bool) -> None:
    """A communication hook may return a tensor of its own."""
    params = params_of_all_kinds()
    bucket = bucket_of(params, grads_are_views=views)
    pack(bucket, UNSCALED)
    average = torch.randn_like(bucket.flat)
    bucket.unpack(average)
    assert_same_bits(grads_of(params), bucket.views_into(average))
    assert all((param.grad is view) == views for param, view in zip(params, bucket.views, strict=True))


@pytest.mark.parametrize(("had_one", "views"), [(False, False), (False, True), (True, False)])
def test_a_globally_unused_gradient_stays_as_it_is(had_one: bool, views: bool) -> None:
    params = [parameter(torch.randn(3)), parameter(torch.randn(2))]
    bucket = bucket_of(params, grads_are_views=views)
    if not had_one:
        params[0].grad = None
    kept, values = params[0].grad, grads_of(params[:1])
    pack(bucket, UNSCALED)
    average = torch.randn_like(bucket.flat)
    bucket.unpack(average, globally_unused=[True, False])
    assert params[0].grad is kept
    assert_same_bits(grads_of(params), [*values[: int(had_one)], average[3:]])


# ------------------------------------------------------------------ resident and bound


def test_gradients_that_exist_move_in_where_they_are_to_be_views() -> None:
    params = params_of_all_kinds()
    before = grads_of(params)
    params[0].grad = None
    bucket = bucket_of(params, grads_are_views=True)
    bucket.move_grads_in()
    assert params[0].grad is None
    assert all(param.grad is view for param, view in zip(params[1:], bucket.views[1:], strict=True))
    assert_same_bits(grads_of(params[1:]), before[1:])


def test_a_gradient_with_a_graph_moves_in_without_it() -> None:
    """As `create_graph=True` leaves it: what is packed later must not become part of that graph."""
    params = [torch.nn.Parameter(torch.ones(3))]
    params[0].grad = torch.ones(3, requires_grad=True) * 2
    bucket = bucket_of(params, grads_are_views=True)
    bucket.move_grads_in()
    assert bucket.views[0].tolist() == [2.0] * 3
    assert not bucket.views[0].requires_grad


@pytest.mark.parametrize("views", [False, True])
def test_otherwise_they_are_left_where_they_are(views: bool) -> None:
    params = params_of_all_kinds()
    grads = [param.grad for param in params]
    bucket = bucket_of(params, grads_are_views=views)
    if not views:
        bucket.move_grads_in()
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))


def test_a_resident_gradient_is_the_average_already() -> None:
    params = params_of_all_kinds()
    bucket = bucket_of(params, grads_are_views=True)
    bucket.move_grads_in()
    pack(bucket, RESIDENT)
    bucket.flat.mul_(WORLD)
    averages = [view.clone() for view in bucket.views]
    bucket.unpack(bucket.comm_buffer)
    assert all(param.grad is view for param, view in zip(params, bucket.views, strict=True))
    assert_same_bits(grads_of(params), averages)


def test_another_object_over_the_same_memory_is_replaced_by_the_view() -> None:
    params = [parameter(torch.randn(4)), parameter(torch.randn(4))]
    bucket = bucket_of(params, grads_are_views=True)
    pack(bucket, RESIDENT)
    params[0].grad = params[0].grad.detach()
    bucket.unpack(bucket.comm_buffer)
    assert params[0].grad is bucket.views[0]


def test_a_gradient_replaced_during_backward_is_an_error_with_views() -> None:
    params = params_of_all_kinds()
    bucket = bucket_of(params, grads_are_views=True)
    pack(bucket, RESIDENT)
    params[2].grad = torch.zeros_like(params[2])
    with pytest.raises(RuntimeError, match=r"not the expected DDP bucket view.*`p2`"):
        bucket.unpack(bucket.comm_buffer)


def test_other_memory_under_a_view_is_noticed() -> None:
    """`grad.data = ...`, where a script has the view object itself."""
    params = [parameter(torch.randn(16)) for _ in range(2)]
    bucket = bucket_of(params, grads_are_views=True)
    pack(bucket, RESIDENT)
    place = bucket.flat.data_ptr()
    bucket.begin_pass()
    assert bucket.flat.data_ptr() == place
    params[0].grad.data = torch.ones(16)
    pack(bucket, RESIDENT)
    assert share_memory(bucket) == [True, True]
    assert bucket.views[0].data_ptr() == bucket.flat.data_ptr()
    assert_same_bits([bucket.flat[:16]], [torch.ones(16) * (1 / WORLD)])


def test_other_memory_has_the_same_layout() -> None:
    """Another rank may keep its memory, and so the strides that the parameter had before."""
    params = [parameter(torch.randn(2, 3, 4, 5))]
    bucket = bucket_of(params, grads_are_views=True)
    pack(bucket, RESIDENT)
    params[0].data = params[0].data.to(memory_format=torch.channels_last)
    params[0].grad.data = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    bucket.begin_pass()
    pack(bucket, UNSCALED)
    assert torch.equal(bucket.flat, torch.arange(120.0))
