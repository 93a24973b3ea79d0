"""Packing and unpacking one bucket: which bits come out, and where gradients lie afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

from minddp.acceleration.gradient_aliasing import SMALLEST_BYTES
from minddp.core.bucket import Bucket, allocate_buckets
from minddp.core.packing import RUN_BYTES, RUN_SLOTS, Scaling
from minddp.core.plan import ParamSpec, plan_from_registration

WORLD = 3  # x * (1 / 3) and x / 3 differ in bits for many x
MEAN = Scaling(WORLD, divide_resident=True)  # as with gradient_as_bucket_view
BATCHED = Scaling(WORLD, divide_copied=True, divide_resident=True)  # as with batched_grad_copy


def pack(bucket: Bucket, scaling: Scaling) -> None:
    """All of the bucket, as in one backward."""
    bucket.begin_pass()
    for run in range(len(bucket.runs)):
        bucket.pack(run, scaling)


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with the tensor's strides and a gradient in autograd's layout."""
    param = torch.nn.Parameter(tensor)
    param.grad = torch.randn_like(tensor, memory_format=torch.preserve_format)
    return param


def bucket_of(params: Sequence[torch.nn.Parameter], *, views: bool = False) -> Bucket:
    """One bucket for all of them, in reverse order as DDP has it; asserts that there is only one."""
    specs = [ParamSpec(f"p{i}", p.numel(), p.dtype, p.device) for i, p in enumerate(params)]
    (bucket,) = allocate_buckets(plan_from_registration(specs, [1 << 40]), params, grads_are_views=views)
    return bucket


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def params_of_all_kinds(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Small and large, row-major, channels_last, transposed, 0-dim, empty."""
    numel_of_large = RUN_BYTES // dtype.itemsize
    return [
        parameter(torch.randn(5, 3, dtype=dtype)),
        parameter(torch.randn(numel_of_large, dtype=dtype)),
        parameter(torch.randn(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)),
        parameter(torch.randn((), dtype=dtype)),
        parameter(torch.randn(0, 4, dtype=dtype)),
        parameter(torch.randn(7, 6, dtype=dtype).t()),
        parameter(torch.randn(300, numel_of_large // 200, dtype=dtype).t()),
    ]


def grads_of(params: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [param.grad.clone() for param in params]


def assert_same_bits(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype == b.dtype, index
        assert torch.equal(a, b), index


def test_the_two_ways_to_take_the_mean_differ_in_bits() -> None:
    """Otherwise the tests below could not tell them apart."""
    x = torch.randn(1000)
    assert not torch.equal(x * (1 / WORLD), x / WORLD)
    assert not torch.equal(x.double() * (1 / WORLD), x.double() / WORLD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("views", [False, True])
def test_a_copied_gradient_is_multiplied(dtype: torch.dtype, views: bool) -> None:
    params = params_of_all_kinds(dtype)
    before = grads_of(params)
    bucket = bucket_of(params, views=False)
    bucket.grads_are_views = views  # the gradients lie elsewhere still
    pack(bucket, MEAN)
    assert_same_bits(bucket.views, [grad * (1 / WORLD) for grad in before])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_batched_copy_is_divided(dtype: torch.dtype) -> None:
    params = params_of_all_kinds(dtype)
    bucket = bucket_of(params)
    pack(bucket, BATCHED)
    assert_same_bits(bucket.views, [param.grad / WORLD for param in params])


@pytest.mark.parametrize("views", [False, True])
def test_without_divisor_nothing_is_scaled(views: bool) -> None:
    params = params_of_all_kinds()
    before = grads_of(params)
    bucket = bucket_of(params, views=views)
    pack(bucket, Scaling(None))
    assert_same_bits(bucket.views, before)
    pack(bucket, Scaling(None))  # with views: now everything is resident
    assert_same_bits(bucket.views, before)


def test_resident_gradients_are_divided() -> None:
    params = params_of_all_kinds()
    before = grads_of(params)
    bucket = bucket_of(params, views=True)  # adopts the gradients that are there
    assert all(param.grad is view for param, view in zip(params, bucket.views, strict=True))
    pack(bucket, MEAN)
    assert_same_bits(bucket.views, [grad / WORLD for grad in before])


def test_a_replaced_gradient_is_copied_and_bound_anew_its_neighbours_are_divided() -> None:
    params = params_of_all_kinds()
    bucket = bucket_of(params, views=True)
    replacement = torch.randn_like(params[0])
    params[0].grad = replacement.clone()
    before = grads_of(params)
    pack(bucket, MEAN)
    expected = [replacement * (1 / WORLD)] + [grad / WORLD for grad in before[1:]]
    assert_same_bits(bucket.views, expected)
    assert params[0].grad is bucket.views[0]


@pytest.mark.parametrize("scaling", [MEAN, BATCHED, Scaling(None)])
@pytest.mark.parametrize("views", [False, True])
def test_a_missing_gradient_counts_as_zero_and_stays_missing_while_packing(views: bool, scaling: Scaling) -> None:
    params = params_of_all_kinds()
    bucket = bucket_of(params, views=views)
    bucket.flat.fill_(7)
    for param in params:
        param.grad = None
    params[0].grad = torch.ones_like(params[0])
    pack(bucket, scaling)
    assert bucket.views[0].count_nonzero() == params[0].numel()
    assert bucket.flat.count_nonzero() == params[0].numel()
    assert all(param.grad is None for param in params[1:])


def test_with_views_packing_binds_what_it_copied() -> None:
    params = params_of_all_kinds()
    bucket = bucket_of(params, views=True)
    for param in params:
        param.grad = torch.ones_like(param)
    pack(bucket, MEAN)
    assert all(param.grad is view for param, view in zip(params, bucket.views, strict=True))
    assert all(p.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr() for p in params)


def test_without_views_gradients_never_share_memory_with_the_bucket() -> None:
    params = params_of_all_kinds()
    params[0].grad = None
    bucket = bucket_of(params)
    pack(bucket, MEAN)
    bucket.unpack(bucket.flat)
    for param in params:
        assert param.grad.untyped_storage().data_ptr() != bucket.flat.untyped_storage().data_ptr()


def test_unpacking_keeps_the_gradient_objects() -> None:
    """The optimizer, or a user, may hold on to them."""
    params = params_of_all_kinds()
    grads = [param.grad for param in params]
    bucket = bucket_of(params)
    pack(bucket, MEAN)
    bucket.flat.mul_(WORLD)
    bucket.unpack(bucket.flat)
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    assert_same_bits(grads, list(bucket.views))


@pytest.mark.parametrize("views", [False, True])
def test_unpacking_a_result_that_lies_elsewhere(views: bool) -> None:
    """A communication hook may return a tensor of its own."""
    params = params_of_all_kinds()
    bucket = bucket_of(params, views=views)
    pack(bucket, Scaling(None))
    result = torch.randn_like(bucket.flat)
    bucket.unpack(result)
    assert_same_bits([param.grad for param in params], list(bucket.views_into(result)))
    if views:
        assert all(param.grad is view for param, view in zip(params, bucket.views, strict=True))


@pytest.mark.parametrize("views", [False, True])
def test_unpacking_gives_a_gradient_to_parameters_without_one(views: bool) -> None:
    params = params_of_all_kinds()
    for param in params:
        param.grad = None
    bucket = bucket_of(params, views=views)
    pack(bucket, MEAN)
    bucket.flat.copy_(torch.randn_like(bucket.flat))
    bucket.unpack(bucket.flat)
    assert_same_bits([param.grad for param in params], list(bucket.views))
    assert [param.grad.stride() for param in params] == [param.stride() for param in params]


LARGE = SMALLEST_BYTES // 4  # float32 elements


def handed_over(bucket: Bucket) -> list[bool]:
    return [
        param.grad.data_ptr() == view.data_ptr() for param, view in zip(bucket.params, bucket.views, strict=True)
    ]


def pack_and_unpack(bucket: Bucket, scaling: Scaling) -> None:
    pack(bucket, scaling)
    bucket.unpack(bucket.flat, may_hand_over=True)


HELD = {
    "itself": lambda grad: grad,
    "a view": lambda grad: grad[:3],
    "detached": lambda grad: grad.detach(),
    "its data": lambda grad: grad.data,
    "its storage": lambda grad: grad.untyped_storage(),
    "an array": lambda grad: grad.numpy(),
    "a capsule": torch.utils.dlpack.to_dlpack,
    "nothing": lambda grad: None,
}


@pytest.mark.parametrize("how", HELD)
def test_what_nobody_else_holds_is_handed_over(how: str) -> None:
    """[Note: handing gradients over]: `.grad` may become the bucket's memory if that cannot be seen."""
    params = [parameter(torch.randn(LARGE)) for _ in range(3)]
    held = HELD[how](params[1].grad)
    place = params[1].grad.data_ptr()
    bucket = bucket_of(params)
    before = grads_of(params)
    pack_and_unpack(bucket, Scaling(WORLD))
    assert handed_over(bucket) == [True, held is None, True]
    assert (params[1].grad.data_ptr() == place) == (held is not None)
    assert_same_bits(bucket.views, [grad * (1 / WORLD) for grad in before])
    assert_same_bits(grads_of(params), bucket.views)


@pytest.mark.parametrize("how", HELD)
def test_memory_that_somebody_keeps_is_left_to_him(how: str) -> None:
    """And nothing is handed over from then on, as each time would cost a whole bucket."""
    params = [parameter(torch.randn(LARGE)) for _ in range(2)]
    bucket = bucket_of(params)
    pack_and_unpack(bucket, MEAN)
    kept, value, place = HELD[how](params[0].grad), params[0].grad.clone(), bucket.flat.data_ptr()
    for _ in range(2):
        for param in params:
            param.grad = torch.ones(LARGE)
        pack_and_unpack(bucket, MEAN)
        assert (bucket.flat.data_ptr() == place) == (kept is None)
        assert handed_over(bucket) == [kept is None] * 2
    if isinstance(kept, torch.Tensor):
        assert_same_bits([kept], [value[: kept.numel()]])


def test_a_gradient_that_stays_is_packed_where_it_lies() -> None:
    """As after zero_grad(set_to_none=False): nobody keeps it, and the bucket keeps its memory."""
    params = [parameter(torch.randn(LARGE)) for _ in range(2)]
    bucket = bucket_of(params)
    pack_and_unpack(bucket, MEAN)
    place = bucket.flat.data_ptr()
    params[0].grad = torch.ones(LARGE)
    before = grads_of(params)
    pack(bucket, Scaling(WORLD))
    assert bucket.flat.data_ptr() == place
    assert_same_bits(bucket.views, [grad * (1 / WORLD) for grad in before])
    bucket.unpack(bucket.flat)
    assert_same_bits(grads_of(params), bucket.views)


def test_what_is_done_to_a_gradient_is_not_done_to_the_next() -> None:
    params = [parameter(torch.randn(LARGE // 64, 64))]
    bucket = bucket_of(params)
    pack_and_unpack(bucket, MEAN)
    params[0].grad.t_()
    params[0].grad.requires_grad_()
    params[0].grad = torch.ones(LARGE // 64, 64)
    pack_and_unpack(bucket, MEAN)
    assert handed_over(bucket) == [True]
    assert params[0].grad.shape == (LARGE // 64, 64)
    assert not params[0].grad.requires_grad


def test_small_gradients_and_those_that_may_not_be_are_copied() -> None:
    params = [parameter(torch.randn(16)), parameter(torch.randn(LARGE))]
    bucket = bucket_of(params)
    pack_and_unpack(bucket, MEAN)
    assert handed_over(bucket) == [False, True]
    others = bucket_of([parameter(torch.randn(LARGE))])
    pack(others, MEAN)
    others.unpack(others.flat)
    assert handed_over(others) == [False]


def test_what_could_be_told_by_its_address_or_strides_is_not_handed_over() -> None:
    """Kernels choose by alignment how they add, and code may ask for strides."""
    misaligned = bucket_of([parameter(torch.randn(LARGE + 1)) for _ in range(2)])
    pack_and_unpack(misaligned, MEAN)
    assert handed_over(misaligned) == [True, False]
    param = parameter(torch.randn(256, 256))
    bucket = bucket_of([param])
    for transposed in (False, True):
        param.grad = torch.randn(256, 256).t() if transposed else torch.randn(256, 256)
        pack_and_unpack(bucket, MEAN)
        assert handed_over(bucket) == [not transposed]


def test_other_memory_under_a_view_is_noticed() -> None:
    """gradient_as_bucket_view, where a script has the view object itself."""
    params = [parameter(torch.randn(16)) for _ in range(2)]
    bucket = bucket_of(params, views=True)
    pack(bucket, MEAN)
    params[0].grad.data = torch.ones(16)
    pack(bucket, MEAN)
    assert handed_over(bucket) == [True, True]
    assert_same_bits(bucket.views[:1], [torch.ones(16) * (1 / WORLD)])


def test_what_lies_in_the_bucket_as_another_object_is_divided_there() -> None:
    """As what autograd has accumulated into the bucket is, with gradient_as_bucket_view."""
    params = [parameter(torch.randn(16)) for _ in range(2)]
    bucket = bucket_of(params, views=True)
    pack(bucket, MEAN)
    before = bucket.flat.clone()
    params[0].grad = params[0].grad.detach()
    params[1].grad = torch.ones(16)
    pack(bucket, MEAN)
    assert handed_over(bucket) == [True, True]
    assert_same_bits(grads_of(params), [before[:16] / WORLD, torch.ones(16) * (1 / WORLD)])


@pytest.mark.parametrize("had_one", [False, True])
def test_unpacking_leaves_what_is_to_be_kept(had_one: bool) -> None:
    params = params_of_all_kinds()
    if not had_one:
        params[0].grad = None
    kept = params[0].grad.clone() if had_one else None
    bucket = bucket_of(params)
    pack(bucket, MEAN)
    bucket.unpack(torch.randn_like(bucket.flat), untouched=[True] + [False] * (len(params) - 1))
    assert (params[0].grad is None) if kept is None else torch.equal(params[0].grad, kept)


def test_a_gradient_replaced_during_backward_is_an_error_with_views() -> None:
    params = params_of_all_kinds()
    bucket = bucket_of(params, views=True)
    pack(bucket, MEAN)
    params[2].grad = torch.zeros_like(params[2])
    with pytest.raises(RuntimeError, match=r"not the expected DDP bucket view.*`p2`"):
        bucket.unpack(bucket.flat)


def test_views_have_the_parameters_strides_where_those_are_dense() -> None:
    params = params_of_all_kinds()
    sparse_strides = torch.nn.Parameter(torch.randn(4, 6)[:, ::2])
    bucket = bucket_of([*params, sparse_strides])
    assert [view.stride() for view in bucket.views] == [param.stride() for param in params] + [(3, 1)]


def test_strides_that_differ_are_told_once_and_still_right() -> None:
    param = torch.nn.Parameter(torch.randn(3, 4))
    param.grad = torch.randn(4, 3).t()
    bucket = bucket_of([param])
    with pytest.warns(UserWarning, match=r"strides do not match.*`p0`: \(1, 3\) against \(4, 1\)"):
        pack(bucket, MEAN)
    assert torch.equal(bucket.views[0], param.grad * (1 / WORLD))


def test_a_gradient_of_another_dtype_is_an_error() -> None:
    param = torch.nn.Parameter(torch.randn(3))
    bucket = bucket_of([param])
    param.data = param.data.double()
    param.grad = torch.randn(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"Expected torch.float32, got torch.float64 .*`p0`"):
        pack(bucket, MEAN)


def test_large_and_small_gradients_in_any_arrangement() -> None:
    """Every gradient is scaled exactly once, whatever its neighbours' sizes."""
    large = RUN_BYTES // 4
    middle = large // 3
    for sizes in (
        [large],
        [middle] * 10,
        [middle, large, middle, middle, middle, 1],
        [1, large],
        [large, 1],
        [1, large, 1, 2, large, large, 3],
        [1, 2, 3],
        [0, large, 0],
    ):
        params = [parameter(torch.randn(size)) for size in sizes]
        bucket = bucket_of(params)
        pack(bucket, MEAN)
        assert_same_bits(bucket.views, [param.grad * (1 / WORLD) for param in params])


def test_a_run_holds_only_so_many_tiny_gradients() -> None:
    bucket = bucket_of([parameter(torch.randn(2)) for _ in range(2 * RUN_SLOTS + 1)])
    assert [len(run.views) for run in bucket.runs] == [RUN_SLOTS, RUN_SLOTS, 1]
    pack(bucket, MEAN)
    assert_same_bits(bucket.views, [param.grad * (1 / WORLD) for param in bucket.params])


# ------------------------------------------------------------------ [Note: gradients in hand]


def small_params(count: int = 3) -> list[torch.nn.Parameter]:
    return [parameter(torch.randn(4, 3)) for _ in range(count)]


def give_new_grads(params: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """As a further backward does; returns copies of them."""
    for param in params:
        param.grad = torch.randn_like(param)
    return grads_of(params)


def laid_out(bucket: Bucket, params: Sequence[torch.nn.Parameter]) -> Bucket:
    """Strides are looked at in the first packing, and only then is anything kept in hand."""
    pack_and_unpack(bucket, MEAN)
    give_new_grads(params)
    bucket.begin_pass()
    return bucket


def test_a_run_is_taken_when_all_gradients_are_there() -> None:
    params = small_params()
    bucket = laid_out(bucket_of(params), params)
    assert bucket.take(0)
    late, params[1].grad = params[1].grad, None
    assert not bucket.take(0)
    params[1].grad = late
    params[0].grad = torch.ones_like(params[0])
    before = grads_of(params)
    bucket.pack(0, MEAN)  # what was taken when one was missing is not what is packed
    assert_same_bits(bucket.views, [grad * (1 / WORLD) for grad in before])


def test_an_incomplete_run_counts_what_is_missing_as_zero() -> None:
    params = small_params()
    bucket = laid_out(bucket_of(params), params)
    params[1].grad = None
    assert not bucket.take(0)
    before = [params[0].grad.clone(), torch.zeros(4, 3), params[2].grad.clone()]
    bucket.pack(0, MEAN)
    assert_same_bits(bucket.views, [grad * (1 / WORLD) for grad in before])


@pytest.mark.parametrize("interrupted", ["taken", "packed"])
def test_what_an_interrupted_pass_has_left_in_hand_is_not_packed(interrupted: str) -> None:
    params = small_params()
    bucket = laid_out(bucket_of(params), params)
    assert bucket.take(0)
    if interrupted == "packed":
        bucket.pack(0, MEAN)
    old = [weakref.ref(param.grad) for param in params]
    before = give_new_grads(params)
    bucket.begin_pass()
    assert [reference() for reference in old] == [None] * 3
    bucket.pack(0, MEAN)
    bucket.unpack(bucket.wire)
    assert_same_bits(grads_of(params), [grad * (1 / WORLD) for grad in before])


def _replace(params: Sequence[torch.nn.Parameter]) -> None:
    params[1].grad = torch.full_like(params[1], 7)


def _drop(params: Sequence[torch.nn.Parameter]) -> None:
    params[1].grad = None


def _swap(params: Sequence[torch.nn.Parameter]) -> None:
    params[0].grad, params[1].grad = params[1].grad, params[0].grad


def _wrap_anew(params: Sequence[torch.nn.Parameter]) -> None:
    params[1].grad = params[1].grad.detach()


def _put_memory(params: Sequence[torch.nn.Parameter]) -> None:
    params[1].grad.data = torch.full_like(params[1], 7)


@pytest.mark.parametrize("change", [_replace, _drop, _swap, _wrap_anew, _put_memory])
def test_averages_reach_what_is_the_gradient_when_backward_ends(
    change: Callable[[Sequence[torch.nn.Parameter]], None],
) -> None:
    """Whatever has been packed. The gradients beside it are served, too, and those of another run."""
    params = [
        *small_params(),
        parameter(torch.randn(LARGE)),
        *(parameter(torch.randn(LARGE - 1)) for _ in range(9)),
    ]
    bucket = laid_out(bucket_of(params), params)
    assert len(bucket.runs) == 3
    before = grads_of(params)
    for run in range(3):
        assert bucket.take(run)
        bucket.pack(run, MEAN)
    packed = [param.grad for param in params]
    change(params)
    kept = [param.grad for param in params]
    bucket.unpack(bucket.wire)
    assert_same_bits(grads_of(params), [grad * (1 / WORLD) for grad in before])
    assert all(grad is None or param.grad is grad for param, grad in zip(params, kept, strict=True))
    if change in (_replace, _drop):
        assert torch.equal(packed[1], before[1])  # it is nobody's gradient any more


def test_what_no_rank_has_used_is_left_alone_though_it_is_in_hand() -> None:
    params = small_params()
    bucket = laid_out(bucket_of(params), params)
    before = grads_of(params)
    bucket.pack(0, MEAN)
    bucket.unpack(bucket.wire, untouched=[False, True, False])
    averages = [grad * (1 / WORLD) for grad in before]
    assert_same_bits(grads_of(params), [averages[0], before[1], averages[2]])


def test_gradients_in_hand_get_what_a_hook_gives_for_the_bucket() -> None:
    params = small_params()
    bucket = laid_out(bucket_of(params), params)
    bucket.pack(0, MEAN)
    result = torch.randn_like(bucket.wire)
    bucket.unpack(result)
    assert_same_bits(grads_of(params), bucket.views_into(result))


ENDS: dict[str, Callable[[Bucket], None]] = {
    "plain": lambda bucket: bucket.unpack(bucket.wire),
    "handing over": lambda bucket: bucket.unpack(bucket.wire, may_hand_over=True),
    "from elsewhere": lambda bucket: bucket.unpack(bucket.wire.clone()),
    "all touched": lambda bucket: bucket.unpack(bucket.wire, untouched=[False] * len(bucket.params)),
    "none touched": lambda bucket: bucket.unpack(bucket.wire, untouched=[True] * len(bucket.params)),
}


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_nothing_stays_in_hand_when_backward_has_ended(end: str, views: bool) -> None:
    """Or gradients would outlive `zero_grad`, and a step would need their memory twice."""
    params = [*small_params(), parameter(torch.randn(LARGE)), parameter(torch.randn(3))]
    bucket = laid_out(bucket_of(params, views=views), params)
    before = [weakref.ref(param.grad) for param in params]
    for run in range(len(bucket.runs)):
        assert bucket.take(run)
        bucket.pack(run, MEAN)
    ENDS[end](bucket)
    for param in params:
        param.grad = None
    assert [reference() for reference in before] == [None] * len(params)


def test_gradients_in_hand_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When they are expected; and once more when the averages come, since they may be others then."""
    asked: list[str] = []

    def counted(param: torch.nn.Parameter) -> torch.Tensor | None:
        asked.append(names[id(param)])
        return param.grad

    params = small_params()
    names = {id(param): f"p{number}" for number, param in enumerate(params)}
    bucket = laid_out(bucket_of(params), params)
    monkeypatch.setattr("minddp.core.packing.grad_of", counted)
    bucket.take(0)
    bucket.pack(0, MEAN)
    assert asked == ["p0", "p1", "p2"]
