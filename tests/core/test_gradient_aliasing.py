"""Gradients that alias the bucket: under each condition of [Note: gradient aliasing], and unseen by the script."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minddp.core.bucket import Bucket
from minddp.core.gradient_aliasing import SMALLEST_BYTES, BucketAliasing, GradientAliasing
from tests.buckets import COPIED, WORLD, assert_same_bits, bucket_of, grads_of, pack, parameter, share_memory
from tests.fakes import FakeDDP, FakeTransport
from tests.modules import HidesItsOutput

LARGE = SMALLEST_BYTES // 4  # float32 elements
WIDTH = 128  # of layers whose weights are large
X = torch.ones(1, WIDTH)


def aliasing_bucket(params: list[nn.Parameter]) -> Bucket:
    """As if the backward had made every gradient."""
    owner = GradientAliasing(params)
    owner.without_grad = set(params)
    return bucket_of(params, make_aliasing=partial(BucketAliasing, owner))


def pack_and_unpack(bucket: Bucket) -> None:
    pack(bucket, COPIED)
    bucket.unpack(bucket.comm_buffer)


# ------------------------------------------------------------------ one bucket

HOLD: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda grad: grad,
    "a view": lambda grad: grad[:3],
    "detached": lambda grad: grad.detach(),
    "its data": lambda grad: grad.data,
    "its storage": lambda grad: grad.untyped_storage(),
    "an array": lambda grad: grad.numpy(),
    "a capsule": torch.utils.dlpack.to_dlpack,
    "in a graph": lambda grad: grad * torch.ones(1, requires_grad=True),
    "in a future": lambda grad: _completed(grad),
    "nothing": lambda grad: None,
}


def _completed(value: torch.Tensor) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize("how", HOLD)
def test_a_gradient_that_something_else_refers_to_is_copied(how: str) -> None:
    params = [parameter(torch.randn(LARGE)) for _ in range(3)]
    held = HOLD[how](params[1].grad)
    place = params[1].grad.data_ptr()
    bucket = aliasing_bucket(params)
    before = grads_of(params)
    pack_and_unpack(bucket)
    assert share_memory(bucket) == [True, held is None, True]
    assert (params[1].grad.data_ptr() == place) == (held is not None)
    assert_same_bits(grads_of(params), [grad * (1 / WORLD) for grad in before])


@pytest.mark.parametrize("how", HOLD)
def test_memory_that_something_else_holds_is_replaced(how: str) -> None:
    """And nothing is aliased from then on, as each time would cost a whole bucket."""
    params = [parameter(torch.randn(LARGE)) for _ in range(2)]
    bucket = aliasing_bucket(params)
    pack_and_unpack(bucket)
    held, value, place = HOLD[how](params[0].grad), params[0].grad.clone(), bucket.flat.data_ptr()
    for _ in range(2):
        for param in params:
            param.grad = torch.ones(LARGE)
        pack_and_unpack(bucket)
        assert (bucket.flat.data_ptr() == place) == (held is None)
        assert share_memory(bucket) == [held is None] * 2
    if isinstance(held, torch.Tensor):
        assert_same_bits([held], [value[: held.numel()]])


def test_a_gradient_that_stays_is_not_changed_by_packing() -> None:
    """As after zero_grad(set_to_none=False): the bucket leaves it the memory, and aliases nothing again."""
    params = [parameter(torch.randn(LARGE)) for _ in range(2)]
    bucket = aliasing_bucket(params)
    pack_and_unpack(bucket)
    params[0].grad = torch.ones(LARGE)
    before = grads_of(params)
    pack(bucket, COPIED)
    assert_same_bits(grads_of(params), before)
    bucket.unpack(bucket.comm_buffer)
    assert_same_bits(grads_of(params), [grad * (1 / WORLD) for grad in before])
    assert share_memory(bucket) == [False, False]


def test_after_gradients_are_dropped_the_bucket_keeps_its_memory() -> None:
    params = [parameter(torch.randn(LARGE)) for _ in range(2)]
    bucket = aliasing_bucket(params)
    place = bucket.flat.data_ptr()
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(LARGE)
        pack_and_unpack(bucket)
        assert bucket.flat.data_ptr() == place
        assert share_memory(bucket) == [True, True]


def test_an_alias_is_a_tensor_of_its_own() -> None:
    """What a script does to the gradient is not done to the bucket's view."""
    params = [parameter(torch.randn(LARGE // 64, 64))]
    bucket = aliasing_bucket(params)
    pack_and_unpack(bucket)
    assert params[0].grad is not bucket.views[0]
    params[0].grad.t_()
    params[0].grad.requires_grad_()
    params[0].grad = torch.ones(LARGE // 64, 64)
    pack_and_unpack(bucket)
    assert share_memory(bucket) == [True]
    assert params[0].grad.shape == (LARGE // 64, 64)
    assert not params[0].grad.requires_grad


def test_a_small_gradient_is_copied() -> None:
    params = [parameter(torch.randn(LARGE)), parameter(torch.randn(LARGE - 1))]
    bucket = aliasing_bucket(params)
    pack_and_unpack(bucket)
    assert share_memory(bucket) == [True, False]


def test_a_gradient_at_an_odd_address_is_copied() -> None:
    """Kernels choose their order of summation by alignment. 16 floats are 64 bytes."""
    for odd, expected in ((1, False), (8, False), (16, True)):
        bucket = aliasing_bucket([parameter(torch.randn(LARGE + odd)), parameter(torch.randn(LARGE))])
        pack_and_unpack(bucket)
        assert share_memory(bucket) == [True, expected]


def test_a_gradient_of_other_strides_is_copied() -> None:
    param = parameter(torch.randn(256, 256))
    bucket = aliasing_bucket([param])
    for transposed in (False, True):
        strides = (1, 256) if transposed else (256, 1)
        param.grad = torch.empty_strided((256, 256), strides).normal_()
        pack_and_unpack(bucket)
        assert share_memory(bucket) == [not transposed]


def test_an_average_that_lies_elsewhere_is_copied() -> None:
    """What a communication hook returns may be used by the hook afterwards."""
    params = [parameter(torch.randn(LARGE))]
    bucket = aliasing_bucket(params)
    pack(bucket, COPIED)
    average = torch.randn_like(bucket.comm_buffer)
    bucket.unpack(average)
    assert share_memory(bucket) == [False]
    assert params[0].grad.data_ptr() != average.data_ptr()
    assert_same_bits(grads_of(params), [average])


def test_a_globally_unused_gradient_is_not_aliased() -> None:
    params = [parameter(torch.randn(LARGE)), parameter(torch.randn(LARGE))]
    bucket = aliasing_bucket(params)
    before = grads_of(params)
    pack(bucket, COPIED)
    bucket.unpack(bucket.comm_buffer, globally_unused=[True, False])
    assert share_memory(bucket) == [False, True]
    assert_same_bits(grads_of(params), [before[0], before[1] * (1 / WORLD)])


# ------------------------------------------------------------------ a whole backward


class Layers(nn.Module):
    """Two layers with large weights; the second one in a reentrant checkpoint if `recomputes`."""

    def __init__(self, *, recomputes: bool = False):
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=True) if self.recomputes else self.second(x)


def aliased(ddp: FakeDDP) -> dict[str, bool]:
    """By parameter, True if its gradient lies in a bucket's memory."""
    memory = {bucket.flat.untyped_storage().data_ptr() for bucket in ddp.reducer.store.all()}
    return {
        name: param.grad is not None and param.grad.untyped_storage().data_ptr() in memory
        for name, param in ddp.module.named_parameters()
    }


def test_a_gradient_from_before_the_backward_is_copied() -> None:
    """Something may wait for the average to appear in it."""
    ddp = FakeDDP(Layers())
    ddp(X, sync=False).sum().backward()
    ddp.module.second.weight.grad = None
    ddp.step(X)
    assert aliased(ddp) == {"first.weight": False, "second.weight": True}


def test_gradients_of_one_backward_stay_the_same_objects_in_the_next() -> None:
    """Two backwards without zero_grad: the second adds to the first one's average."""
    ddp = FakeDDP(Layers())
    ddp.step(X)
    kept = {name: param.grad for name, param in ddp.module.named_parameters()}
    ddp.step(X)
    assert all(param.grad is kept[name] for name, param in ddp.module.named_parameters())


@pytest.mark.parametrize(
    ("make", "backward"),
    [
        (Layers, lambda ddp: ddp(X).sum().backward(create_graph=True)),
        # Not the backward that began at the outputs, so what was there when that began is not known.
        (lambda: Layers(recomputes=True), lambda ddp: ddp.step(X)),
        (lambda: HidesItsOutput(Layers()), lambda ddp: ddp(X).tensor.sum().backward()),
    ],
    ids=["creates a graph", "begins in a nested backward", "is not seen to begin"],
)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_nothing_is_aliased_in_a_backward_that(
    make: Callable[[], nn.Module], backward: Callable[[FakeDDP], None]
) -> None:
    ddp = FakeDDP(make())
    backward(ddp)
    assert not any(aliased(ddp).values())


def test_what_another_backward_began_with_does_not_count() -> None:
    """That one has entered at the outputs and reached no parameter; then gradients came, and another backward."""
    ddp = FakeDDP(Layers())
    x = X.clone().requires_grad_()
    torch.autograd.grad(ddp(x).sum(), x)
    for param in ddp.module.parameters():
        param.grad = torch.zeros_like(param)
    ddp(X, sync=False).sum().backward()  # is reduced, as a forward has asked for it, but is not seen to begin
    assert ddp.transport.count("all_reduce") == 1
    assert not any(aliased(ddp).values())


def test_a_backward_that_was_interrupted_leaves_nothing_behind() -> None:
    """The gradients that it has made exist when the next one begins."""
    ddp = FakeDDP(Layers())
    failing = ddp.module.second.weight.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp.step(X)
    failing.remove()
    ddp(X, sync=False).sum().backward()
    kept = {name: param.grad for name, param in ddp.module.named_parameters()}
    ddp.step(X)
    assert all(param.grad is kept[name] for name, param in ddp.module.named_parameters())


def test_a_hook_that_keeps_the_gradient_sees_the_average_in_it() -> None:
    ddp = FakeDDP(Layers(), FakeTransport(world_size=4))
    kept: list[torch.Tensor] = []
    ddp.module.first.weight.register_post_accumulate_grad_hook(lambda param: kept.append(param.grad))
    ddp.step(X)
    assert aliased(ddp) == {"first.weight": False, "second.weight": True}
    assert kept[0] is ddp.module.first.weight.grad


def test_two_wrappers_of_one_layer_each_see_their_own_average() -> None:
    """The one that is finalized first must not make the other's bucket its gradient, or its own."""
    shared = nn.Linear(WIDTH, WIDTH, bias=False)
    one, other = (FakeDDP(nn.Sequential(shared), FakeTransport(world_size=world)) for world in (2, 4))
    alone = torch.autograd.grad(shared(X).sum() + shared(2 * X).sum(), shared.weight)[0]
    for _ in range(3):
        shared.zero_grad()
        (one(X) + other(2 * X)).sum().backward()
        assert torch.equal(shared.weight.grad, alone)
        buckets = [ddp.reducer.store.all()[0].flat.untyped_storage().data_ptr() for ddp in (one, other)]
        assert len(set(buckets)) == 2


def test_what_a_script_keeps_of_a_gradient_stays_as_it_is() -> None:
    """Although the bucket is filled again in the next backward. Other ways to keep it: `HOLD`."""
    ddp = FakeDDP(Layers())
    for _ in range(2):
        ddp.module.zero_grad()
        ddp.step(X)
    assert all(aliased(ddp).values()), "or this test shows nothing"
    kept = [param.grad for param in ddp.module.parameters()]
    values = grads_of(list(ddp.module.parameters()))
    ddp.module.zero_grad()
    ddp.step(5 * X)
    assert all(map(torch.equal, kept, values))
