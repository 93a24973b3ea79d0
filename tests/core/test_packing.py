"""Packing: which bits each kind of gradient gets ([Note: the mean is taken first]), and in which groups."""

from __future__ import annotations

import pytest
import torch

from minddp.core.packing import GROUP_BYTES, LARGE_BYTES, LARGE_BYTES_ON_GPU, Scaling, places_by_group
from minddp.core.plan import BucketSpec, ParamSpec, plan_from_registration
from minddp.options import UNBOUNDED
from tests.buckets import (
    BATCHED,
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

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def test_the_two_ways_to_take_the_mean_differ_in_bits() -> None:
    """Otherwise the tests below could not tell them apart."""
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(1000, dtype=dtype)
        assert not torch.equal(x * (1 / WORLD), x / WORLD)


# ------------------------------------------------------------------ bits


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scaling", [COPIED, RESIDENT])
@pytest.mark.parametrize("views", [False, True])
def test_a_copied_gradient_is_multiplied(views: bool, scaling: Scaling, dtype: torch.dtype) -> None:
    params = params_of_all_kinds(dtype)
    before = grads_of(params)
    bucket = bucket_of(params, grads_are_views=views)  # the gradients lie elsewhere still
    pack(bucket, scaling)
    assert_same_bits(bucket.views, [grad * (1 / WORLD) for grad in before])


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_batched_copy_is_divided(dtype: torch.dtype) -> None:
    params = params_of_all_kinds(dtype)
    bucket = bucket_of(params)
    pack(bucket, BATCHED)
    assert_same_bits(bucket.views, [param.grad / WORLD for param in params])


@pytest.mark.parametrize("scaling", [RESIDENT, BATCHED])
def test_a_resident_gradient_is_divided(scaling: Scaling) -> None:
    params = params_of_all_kinds()
    before = grads_of(params)
    bucket = bucket_of(params, grads_are_views=True)
    bucket.move_grads_in()
    pack(bucket, scaling)
    assert_same_bits(bucket.views, [grad / WORLD for grad in before])


@pytest.mark.parametrize("views", [False, True])
def test_without_divisor_nothing_is_scaled(views: bool) -> None:
    params = params_of_all_kinds()
    before = grads_of(params)
    bucket = bucket_of(params, grads_are_views=views)
    for _ in range(2):  # with views, everything is resident the second time
        pack(bucket, UNSCALED)
        assert_same_bits(bucket.views, before)


@pytest.mark.parametrize("in_pairs", [False, True])
def test_complex_numbers_are_divided_as_pairs_of_real_ones_if_all_are_divided(in_pairs: bool) -> None:
    grad = torch.randn(1000, dtype=torch.complex64)
    scaled = grad.clone()
    Scaling(WORLD, divide_resident=True, divide_all=in_pairs).apply(scaled, resident=True)
    pairs = torch.view_as_complex(torch.view_as_real(grad) / WORLD)
    assert torch.equal(scaled, pairs if in_pairs else grad / WORLD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scaling", "divides"),
    [(COPIED, False), (RESIDENT, False), (BATCHED, True)],
    ids=["copied", "views", "batched"],
)
def test_a_group_that_is_not_contiguous_gets_the_same_bits(
    scaling: Scaling, divides: bool, dtype: torch.dtype
) -> None:
    """A large gradient lies between the small ones of one group."""
    params = [parameter(torch.randn(size, dtype=dtype)) for size in (500, LARGE_BYTES, 500)]
    bucket = bucket_of(params)
    assert [group.flat is None for group in bucket.groups] == [True, False]
    pack(bucket, scaling)
    assert_same_bits(bucket.views, [p.grad / WORLD if divides else p.grad * (1 / WORLD) for p in params])


# ------------------------------------------------------------------ gradients that lie elsewhere, or are missing


def test_a_replaced_gradient_is_copied_and_bound_anew_while_its_neighbours_are_divided() -> None:
    params = params_of_all_kinds()
    bucket = bucket_of(params, grads_are_views=True)
    bucket.move_grads_in()
    replacement = torch.randn_like(params[0])
    params[0].grad = replacement.clone()
    before = grads_of(params)
    pack(bucket, RESIDENT)
    assert_same_bits(bucket.views, [replacement * (1 / WORLD)] + [grad / WORLD for grad in before[1:]])
    assert params[0].grad is bucket.views[0]


def test_what_lies_in_the_bucket_as_another_object_is_divided_there() -> None:
    params = [parameter(torch.randn(16)) for _ in range(2)]
    bucket = bucket_of(params, grads_are_views=True)
    pack(bucket, RESIDENT)
    before = bucket.flat.clone()
    params[0].grad = params[0].grad.detach()
    params[1].grad = torch.ones(16)
    pack(bucket, RESIDENT)
    assert_same_bits(grads_of(params), [before[:16] / WORLD, torch.ones(16) * (1 / WORLD)])
    assert all(param.grad is view for param, view in zip(params, bucket.views, strict=True))


def test_what_lies_in_the_bucket_in_another_layout_is_transposed_there() -> None:
    """`.grad = .grad.t()` of a square gradient begins at the same address. Torch divides it, too."""
    params = [parameter(torch.randn(4, 4)) for _ in range(2)]
    bucket = bucket_of(params, grads_are_views=True)
    pack(bucket, RESIDENT)
    params[0].grad = params[0].grad.t()
    before = grads_of(params)
    pack(bucket, RESIDENT)
    assert_same_bits(grads_of(params), [grad / WORLD for grad in before])
    assert all(param.grad is view for param, view in zip(params, bucket.views, strict=True))


@pytest.mark.parametrize("num_buckets", [1, 3])
def test_what_lies_in_the_place_of_another_gradient_is_not_overwritten(num_buckets: int) -> None:
    """Two gradients were swapped, for example. Torch overwrites them."""
    params = [parameter(torch.randn(4, 4)) for _ in range(3)]
    buckets = [bucket_of(params[k::num_buckets], grads_are_views=True) for k in range(num_buckets)]
    for bucket in buckets:
        pack(bucket, RESIDENT)
    params[0].grad, params[1].grad, params[2].grad = params[2].grad, params[0].grad, params[1].grad
    before = grads_of(params)
    memory = {bucket.flat.untyped_storage().data_ptr() for bucket in buckets}
    for bucket in buckets:
        bucket.begin_pass(memory)
    for bucket in buckets:
        for group in range(len(bucket.groups)):
            bucket.pack(group, RESIDENT)
    assert_same_bits(grads_of(params), [grad * (1 / WORLD) for grad in before])


@pytest.mark.parametrize("scaling", [COPIED, RESIDENT, BATCHED, UNSCALED])
@pytest.mark.parametrize("views", [False, True])
def test_a_missing_gradient_counts_as_zero_and_stays_missing(views: bool, scaling: Scaling) -> None:
    params = params_of_all_kinds()
    bucket = bucket_of(params, grads_are_views=views)
    bucket.flat.fill_(7)
    for param in params:
        param.grad = None
    params[0].grad = torch.ones_like(params[0])
    pack(bucket, scaling)
    assert bucket.flat.count_nonzero() == bucket.views[0].count_nonzero() == params[0].numel()
    assert all(param.grad is None for param in params[1:])


@pytest.mark.parametrize("views", [False, True])
def test_packing_makes_gradients_views_only_if_they_are_to_be(views: bool) -> None:
    params = params_of_all_kinds()
    bucket = bucket_of(params, grads_are_views=views)
    pack(bucket, COPIED)
    for param, view, shares in zip(params, bucket.views, share_memory(bucket), strict=True):
        assert (param.grad is view) == views
        assert shares == views or param.numel() == 0


# ------------------------------------------------------------------ gradients of the wrong kind


@pytest.mark.parametrize("is_first", [True, False])
def test_a_gradient_of_another_dtype_is_an_error_in_every_step(is_first: bool) -> None:
    param = parameter(torch.randn(3))
    bucket = bucket_of([param])
    if not is_first:
        pack(bucket, COPIED)
    param.data = param.data.double()
    param.grad = torch.randn(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"Expected torch.float32, got torch.float64 .*`p0`"):
        pack(bucket, COPIED)


def test_a_sparse_gradient_in_a_dense_bucket_is_an_error() -> None:
    param = parameter(torch.randn(3))
    param.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"Expected a dense gradient of `p0`, got torch.sparse_coo"):
        pack(bucket_of([param]), COPIED)


# ------------------------------------------------------------------ [Note: pack groups]

LARGE = LARGE_BYTES // 4  # float32 elements
SMALL = LARGE - 1


def spec_of(*sizes: int, device: str = "cpu") -> BucketSpec:
    specs = [ParamSpec(f"p{i}", size, torch.float32, torch.device(device)) for i, size in enumerate(sizes)]
    [bucket] = plan_from_registration(specs, [UNBOUNDED]).buckets
    return bucket


def test_a_large_gradient_is_a_group_and_small_ones_around_it_share_one() -> None:
    assert places_by_group(spec_of(1, LARGE, 2, LARGE, 3)) == [[0, 2, 4], [1], [3]]
    assert places_by_group(spec_of(LARGE)) == [[0]]
    assert places_by_group(spec_of(1, 0, 3)) == [[0, 1, 2]]


def test_a_group_of_small_gradients_closes_once_it_reaches_its_size() -> None:
    per_group = -(-GROUP_BYTES // (SMALL * 4))
    groups = places_by_group(spec_of(*[SMALL] * (2 * per_group + 1)))
    assert [len(group) for group in groups] == [per_group, per_group, 1]


def test_any_number_of_tiny_gradients_shares_a_group() -> None:
    assert places_by_group(spec_of(*[2] * 300)) == [list(range(300))]


def test_on_a_gpu_all_but_large_gradients_are_packed_at_once() -> None:
    large = LARGE_BYTES_ON_GPU // 4
    assert places_by_group(spec_of(*[large - 1] * 20, large, device="cuda")) == [list(range(20)), [20]]


def test_every_gradient_is_scaled_once_in_any_arrangement() -> None:
    middle = LARGE // 3
    for sizes in (
        [LARGE],
        [middle] * 10,
        [SMALL] * 20,
        [middle, LARGE, middle, middle, middle, 1],
        [1, LARGE],
        [LARGE, 1],
        [1, LARGE, 1, 2, LARGE, LARGE, 3],
        [1, 2, 3],
        [0, LARGE, 0],
    ):
        bucket = bucket_of([parameter(torch.randn(size)) for size in sizes])
        pack(bucket, COPIED)
        assert_same_bits(bucket.views, [param.grad * (1 / WORLD) for param in bucket.params])


@pytest.mark.parametrize(("divisor", "restored"), [(None, [4.0]), (4.0, [16.0]), (float("inf"), [4.0])])
def test_scaling_is_undone_unless_nothing_is_left_of_the_gradient(
    divisor: float | None, restored: list[float]
) -> None:
    """A rank of weight zero divides by infinity; zero times infinity would be NaN."""
    tensor = torch.tensor([4.0])
    Scaling(divisor).undo(tensor)
    assert tensor.tolist() == restored
