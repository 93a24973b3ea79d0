"""When the buckets of a plan get their memory, and what the first ones do to gradients that exist."""

from __future__ import annotations

from inspect import signature
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp.core.bucket import Bucket
from minddp.core.bucket_store import BucketStore
from minddp.core.events import EventKind, EventStream
from minddp.core.packing import LARGE_BYTES
from minddp.core.plan import ParamSpec, plan_from_groups
from minddp.modes.join import shadow_backward
from tests.fakes import FakeDDP, FakeTransport
from tests.ranks import on_ranks


class CountingTransport(FakeTransport):
    """Records its allocations."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.calls.append(("allocate", numel))
        return super().allocate(numel, dtype, device)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_memory_comes_with_the_plan() -> None:
    ddp = FakeDDP(two_layers(), CountingTransport())
    assert ddp.transport.calls == [("allocate", 13)]
    assert len(ddp.reducer.store.all()) == 1


def test_lazily_it_comes_with_the_first_backward_that_is_synchronised() -> None:
    ddp = FakeDDP(two_layers(), CountingTransport(), lazy_bucket_allocation=True, bucket_cap_mb=0)
    x = torch.ones(1, 2)
    ddp(x, sync=False).sum().backward()
    assert (ddp.transport.calls, ddp.reducer.store.made) == ([], {})
    output = ddp(x)
    assert ddp.transport.calls == []
    output.sum().backward()
    assert ddp.transport.calls == [("allocate", 13), ("all_reduce", 13)]
    assert ddp.reducer.store.made == {}
    ddp.transport.calls.clear()
    ddp.step(x)  # rebuilt: each bucket takes its memory when its gradient is there
    assert [kind for kind, _ in ddp.transport.calls[-8:]] == ["allocate", "all_reduce"] * 4
    assert ddp.reducer.store.made == {}


def test_lazily_a_rank_without_inputs_makes_them_too() -> None:
    ddp = FakeDDP(two_layers(), CountingTransport(), lazy_bucket_allocation=True)
    shadow_backward(ddp.reducer)
    assert ddp.transport.calls == [("allocate", 13), ("all_reduce", 13)]
    assert ddp.reducer.store.made == {}


def test_lazily_a_view_moves_to_new_memory_with_its_value_which_is_reduced_once() -> None:
    ddp = FakeDDP(two_layers(), CountingTransport(), lazy_bucket_allocation=True, gradient_as_bucket_view=True)
    x = torch.ones(1, 2)
    ddp.step(x)
    before = [param.grad for param in ddp.reducer.params]
    values = [grad.clone() for grad in before]
    ddp(x).sum().backward()
    *early, first_ready = map(torch.equal, before, values)
    assert all(early)
    assert not first_ready, "autograd adds to the old memory until a gradient of the bucket is ready"
    assert all(map(torch.equal, [param.grad for param in ddp.reducer.params], [2 * value for value in values]))
    assert ddp.transport.count("allocate") == 2
    assert not any(param.grad is grad for param, grad in zip(ddp.reducer.params, before, strict=True))


def test_lazily_the_first_gradient_that_is_ready_makes_the_bucket() -> None:
    """It and those that exist then are divided, as in torch 2.15, and what comes later is multiplied."""

    class Seeing(FakeTransport):
        def all_reduce(self, tensor: torch.Tensor) -> Any:
            sent.append(tensor.clone())
            return super().all_reduce(tensor)

    def local_grads() -> list[torch.Tensor]:
        return torch.autograd.grad(ddp.module(x).square().sum(), ddp.reducer.params)

    sent: list[torch.Tensor] = []
    made: list[int] = []
    module, options = two_layers(), {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True}
    ddp = FakeDDP(module, Seeing(world_size=3), **options)
    ddp.reducer.events.watch(
        lambda event: made.append(len(ddp.reducer.store.made)) if event.kind is EventKind.PARAM_READY else None
    )
    x = torch.randn(64, 2)
    slots = ddp.reducer.store.plan.buckets[0].slots
    *later, first = local_grads()
    ddp(x).square().sum().backward()
    divided = torch.cat([*(grad.flatten() * (1 / 3) for grad in later), first / 3])
    assert made == [0, 1, 1, 1]
    assert [slot.param for slot in slots] == [0, 1, 2, 3]
    assert torch.equal(sent[0], divided)
    kept = [param.grad.clone() for param in ddp.reducer.params]
    ddp.reducer.rebuild_if_due()
    order = [slot.param for slot in ddp.reducer.store.plan.buckets[0].slots]
    added = [grad + more for grad, more in zip(kept, local_grads(), strict=True)]
    ddp(x).square().sum().backward()
    assert torch.equal(sent[1], torch.cat([added[param].flatten() / 3 for param in order]))
    assert not torch.equal(sent[1], torch.cat([added[param].flatten() * (1 / 3) for param in order]))


def test_a_rebuild_releases_the_old_memory_first() -> None:
    alive: list[int] = []

    class Watching(CountingTransport):
        def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            alive.append(len(ddp.reducer.store.made) if self.calls else 0)
            return super().allocate(numel, dtype, device)

    ddp = FakeDDP(two_layers(), Watching())
    for _ in range(2):
        ddp.step(torch.ones(1, 2))
    assert alive == [0, 0]


def test_a_late_sink_gets_no_completion_of_an_earlier_launch() -> None:
    class Slow(FakeTransport):
        callbacks: ClassVar[list[Any]] = []

        def all_reduce(self, tensor: torch.Tensor) -> Any:
            work = super().all_reduce(tensor)
            work.get_future = lambda: self
            return work

        def add_done_callback(self, callback: Any) -> None:
            self.callbacks.append(callback)

    transport = Slow()
    ddp = FakeDDP(two_layers(), transport)
    ddp.step(torch.ones(1, 2))
    late: list[Any] = []
    ddp.reducer.events.watch(late.append)
    for callback in transport.callbacks:
        callback(transport)
    assert late == []
    assert ddp.take_events(EventKind.BUCKET_COMPLETED) == ["bucket completed: 0"]


def _trains_alike(rank: int, lazy: bool, options: dict[str, Any], make: Any = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    ddp = (make or minddp.DistributedDataParallel)(module, lazy_bucket_allocation=lazy, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        torch.manual_seed(10 * rank + step)
        x = torch.randn(5, 4)
        if step == 0 and not options.keys() >= {
            "static_graph",
            "gradient_as_bucket_view",
        }:  # torch asserts otherwise
            with ddp.no_sync():  # gradients exist when the first buckets are made
                ddp(x).square().sum().backward()
        ddp(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [param.detach() for param in ddp.parameters()]


@on_ranks(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"transport": "shared_memory"}, {"static_graph": True}],
    ids=["default", "shared memory", "static"],
)
def test_the_time_of_allocation_changes_no_bits(rank: int, options: dict[str, Any]) -> None:
    """But where gradients that are views are kept: they lie elsewhere than the next lazy bucket."""
    assert all(map(torch.equal, *(_trains_alike(rank, lazy, options) for lazy in (False, True))))


@on_ranks(3)
@pytest.mark.skipif("lazy_bucket_allocation" not in signature(TorchDDP).parameters, reason="later torch has it")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
        {"gradient_as_bucket_view": True, "find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "static_graph": True},
        {"gradient_as_bucket_view": True, "batched_grad_copy": True},
        {"find_unused_parameters": True},
    ],
    ids=["default", "views", "views, small buckets", "views, unused", "views, static", "views, batched", "unused"],
)
def test_lazily_bits_are_those_of_torch(rank: int, options: dict[str, Any]) -> None:
    """Also where `.grad` stays: at three ranks it shows which gradients a new bucket has taken in, and divides."""
    assert all(map(torch.equal, *(_trains_alike(rank, True, options, make) for make in (TorchDDP, None))))


# ------------------------------------------------------------------ pack groups and the order of readiness


def store_of(*sizes: int, **options: Any) -> BucketStore:
    params = [nn.Parameter(torch.ones(size)) for size in sizes]
    specs = [ParamSpec(f"p{i}", p.numel(), p.dtype, p.device) for i, p in enumerate(params)]
    return BucketStore(params, specs, Bucket, [0], [8, 16], **options)


def test_pack_groups_are_numbered_through_all_buckets() -> None:
    large = LARGE_BYTES // 4
    store = store_of(1, large, 2)
    store.adopt(plan_from_groups(store.plan.params, [[2, 1, 0]], "hand"), FakeTransport().allocate)
    assert store.pack_groups.places == [(0, 0), (0, 1)]
    assert store.pack_groups.members == [[2, 0], [1]]
    assert store.pack_groups.of_param == {2: 0, 0: 0, 1: 1}
    assert store.pack_groups.per_bucket == [2]
    store.adopt(plan_from_groups(store.plan.params, [[1], [0, 2]], "hand"), FakeTransport().allocate)
    assert store.pack_groups.places == [(0, 0), (1, 0)]
    assert store.pack_groups.of_param == {1: 0, 0: 1, 2: 1}
    assert store.pack_groups.per_bucket == [1, 1]


def test_other_ranks_agree_on_an_order_anew() -> None:
    store = store_of(1, 1, 1)
    store.observe([1, 2, 0])
    store.await_another_order()
    assert not store.rebuild_if_due(FakeTransport(), EventStream()), "it was observed with the former ranks"
    store.observe([1, 2, 0])
    store.rebuild_if_due(FakeTransport(), EventStream())
    store.await_another_order()
    assert store.will_rebuild


def test_a_small_bucket_may_come_last() -> None:
    store = store_of(1, 1, 1, small_last_bucket=True)
    store.observe([0, 1, 2])
    store.rebuild_if_due(FakeTransport(), EventStream())
    assert [[slot.param for slot in spec.slots] for spec in store.plan.buckets] == [[0], [2, 1]]
