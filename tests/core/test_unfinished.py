"""The errors for gradients that did not come or came twice, and the guard that keeps optimizers from stepping."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from minddp.core import unfinished as unfinished_module
from minddp.core.backward_pass import Phase
from minddp.core.events import EventStream
from minddp.core.optimizer_steps import StepWatcher, _watchers
from minddp.core.reducer import Reducer
from minddp.core.unfinished import UnfinishedReduction
from minddp.core.usage_tracker import UsageTracker
from minddp.ddp import DistributedDataParallel
from tests.fakes import FakeDDP, FakeTransport
from tests.logs import logged
from tests.modules import Explosive, Heads, Scales, WithoutGradient
from tests.ranks import on_ranks

X = torch.ones(1, 2)
FACT = "Expected to have finished reduction in the prior iteration before starting a new one"


@pytest.fixture(autouse=True)
def _no_guards_of_earlier_tests() -> None:
    """Exceptions keep wrappers, and these their guards, until the garbage collector runs."""
    gc.collect()


class LeavesOut(nn.Module):
    """A backward, which may explode, leaves `unused` out and brings no gradient for `undefined`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.unused, self.undefined = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
        self.explosive = Explosive()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WithoutGradient.apply(self.last(self.explosive(self.first(x))), self.undefined)


class UsageTrackerOf(UsageTracker):
    def __init__(self, static: bool, finds: bool):
        self.is_static, self.finds_unused = static, finds


def reduction_of(*names: str) -> UnfinishedReduction:
    return UnfinishedReduction([nn.Parameter(torch.zeros(1)) for _ in names], names, "net/2")


def reducer_that_misses(
    missing: list[int], transport: FakeTransport, static: bool = False, finds: bool = False, num_passes: int = 1
) -> Reducer:
    """What an error is made of."""
    return cast(
        "Reducer",
        SimpleNamespace(
            phase=Phase.INCOMPLETE,
            current=SimpleNamespace(missing=lambda: missing),
            transport=transport,
            usage_tracker=UsageTrackerOf(static, finds),
            num_passes=num_passes,
            events=EventStream(),
        ),
    )


@pytest.mark.parametrize(
    ("static", "finds", "phrases"),
    [
        (False, False, ["`find_unused_parameters=True`", "`forward` function outputs participate in calculating"]),
        (False, True, ["`find_unused_parameters=True` is enabled", "not all `forward` outputs"]),
        (True, False, ["training graph has changed", "not compatible with static_graph set to True"]),
    ],
)
def test_the_error_has_torchs_phrases_and_names_parameters_and_ranks(
    static: bool, finds: bool, phrases: list[str]
) -> None:
    unfinished, transport = reduction_of("a", "b", "c.bias"), FakeTransport(5, rank=3)
    error = unfinished.error(reducer_that_misses([0, 2], transport, static, finds, num_passes=7))
    text = str(error)
    assert type(error) is RuntimeError
    for phrase in [FACT, *phrases, "grad for rank 3: a, c.bias", "grad for rank 3: 0 2"]:
        assert phrase in text


def test_another_gradient_that_stays_local_is_another_warning() -> None:
    unfinished = reduction_of("a", "b")
    with logged() as texts:
        for param in (0, 1, 0):
            unfinished.warn_of_local(param, rank=1)
    assert [text.split("`")[1] for text in texts] == ["a", "b"]


def test_each_backward_that_is_dropped_is_warned_of() -> None:
    """Perhaps all ranks have dropped the first one, but this rank alone the second."""
    unfinished = reduction_of("a")
    with logged() as texts:
        for num_passes in (3, 5):
            unfinished.agree_to_drop(FakeTransport(2), num_passes, num_launched=0)
    assert [f"ended backward {number} on rank 0" in text for number, text in zip((3, 5), texts, strict=True)] == [
        True
    ] * 2


def unfinished() -> tuple[Heads, FakeDDP]:
    """A wrapper on rank 1 whose last backward has left the right head out."""
    module = Heads()
    ddp = FakeDDP(module, FakeTransport(rank=1))
    ddp(X)[0].sum().backward()
    return module, ddp


def test_the_optimizer_is_stopped_in_the_same_iteration() -> None:
    module, ddp = unfinished()
    before = [param.clone() for param in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match=rf"{FACT}(.|\n)*rank 1: right.weight, right.bias"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    assert ddp.reducer.store.plan is not None


def test_an_optimizer_of_part_of_the_module_is_stopped_too() -> None:
    module, ddp = unfinished()
    with pytest.raises(RuntimeError, match=FACT):
        torch.optim.Adam([{"params": [nn.Parameter(torch.ones(1))]}, {"params": [module.left.bias]}]).step()
    assert ddp.reducer.store.plan is not None


def test_an_unrelated_optimizer_is_not_stopped() -> None:
    _, ddp = unfinished()
    other = nn.Linear(2, 2)
    other(X).sum().backward()
    before = other.bias.clone()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert not torch.equal(other.bias, before)
    assert ddp.reducer.store.plan is not None


@pytest.mark.parametrize("kinds", ["lr", "b", "n"])
def test_an_optimizer_may_step_if_no_gradient_is_missing(kinds: str) -> None:
    """After a backward for each output, one for both, or local ones, whatever parameters these leave out."""
    module = Heads()
    ddp, optimizer = FakeDDP(module), torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(3):
        left, right = ddp(X, sync=kinds != "n")
        for kind in kinds:
            {"l": left, "r": right, "b": left + right, "n": left}[kind].sum().backward()
        optimizer.step()
    assert bool(ddp.transport.calls) == (kinds != "n")


def test_a_guard_refers_to_its_owner_weakly_and_goes_with_it() -> None:
    module = Heads()
    ddp = FakeDDP(module)
    ddp(X)[0].sum().backward()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match=FACT):
        optimizer.step()
    ddp.reducer.unfinished = None  # the guard alone is gone
    gc.collect()
    optimizer.step()


def test_a_watcher_may_be_collected_while_an_optimizer_steps() -> None:
    """The garbage collector may run at any moment, also while an unrelated optimizer calls its hooks."""

    class Collects(StepWatcher):
        def before_step(self, optimizer: torch.optim.Optimizer) -> None:
            watchers.clear()

    class Fails(StepWatcher):
        def before_step(self, optimizer: torch.optim.Optimizer) -> None:
            raise KeyError("it is gone")

    param = nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    watchers = [Collects(), Fails()]
    for watcher in watchers:
        watcher.watch_steps()
    del watcher
    torch.optim.SGD([param], lr=1.0).step()
    assert param.item() == 0


def test_a_wrapper_that_is_collected_leaves_no_hook_behind() -> None:
    def stopping() -> FakeDDP:
        ddp = FakeDDP(Heads())
        ddp(X)[0].sum().backward()
        return ddp

    first = stopping()
    before = len(_global_optimizer_pre_hooks), len(_watchers())
    for _ in range(20):
        stopping()
    gc.collect()
    assert (len(_global_optimizer_pre_hooks), len(_watchers())) == before
    del first


def test_a_static_graph_that_changes_stops_the_optimizer() -> None:
    """Its gradients are not averaged."""
    ddp = FakeDDP(Heads(), static_graph=True)
    for _ in range(2):
        ddp(X)[0].sum().backward()
    with pytest.raises(RuntimeError, match="graph has changed"):
        ddp(X)[1].sum().backward()
    with pytest.raises(RuntimeError, match=FACT):
        torch.optim.SGD(ddp.module.parameters(), lr=1.0).step()


def interrupted() -> FakeDDP:
    """A wrapper whose second backward an exception has ended, after a gradient and before another one."""
    ddp = FakeDDP(Scales([0, 1], explode_after=0))
    ddp.step(X)
    ddp.module.zero_grad()
    ddp.fail(X)
    return ddp


def test_an_interrupted_backward_is_dropped_by_all_ranks_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where waits are not watched: the next all-reduce would meet one that another rank has launched."""
    monkeypatch.setattr(unfinished_module, "DROP_LIMIT_S", 0.01)
    unfinished, store = reduction_of("a"), dist.HashStore()
    here, other = (FakeTransport(2, rank=rank, store=store) for rank in (0, 1))
    unfinished.agree_to_drop(here, 1, num_launched=0)
    for transport, num_launched in ((here, 1), (other, 2)):
        absent = f"Rank {1 - transport.rank} has not come within 0.01 s"
        with pytest.raises(RuntimeError, match=rf"backward 1 on rank {transport.rank}\. .*{absent}.*every rank"):
            unfinished.agree_to_drop(transport, 1, num_launched)
    unfinished.agree_to_drop(here, 1, num_launched=2)


@on_ranks(2)
def test_a_backward_that_is_dropped_before_a_bucket_is_launched_counts_on_no_rank(rank: int) -> None:
    """Else the next one that all ranks drop would have a different number on each rank."""

    def fails_at(place: torch.Tensor) -> None:
        handle = place.register_hook(Mock(side_effect=KeyError))
        with pytest.raises(KeyError):
            output.sum().backward()
        handle.remove()

    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), bucket_cap_mb=1e-4)
    with patch.object(unfinished_module, "DROP_LIMIT_S", 5.0):
        for first in (True, False):
            ddp(torch.ones(1, 4)).sum().backward()
            output = ddp(torch.ones(1, 4))
            fails_at(output if first and rank == 0 else ddp.module[2 if first else 0].weight)
            ddp.zero_grad()
        ddp(torch.ones(1, 4)).sum().backward()
    assert ddp._reducer.num_passes == 4


def test_the_optimizer_is_stopped_after_an_interrupted_backward_unless_gradients_are_dropped() -> None:
    ddp = interrupted()
    optimizer = torch.optim.SGD(ddp.module.parameters(), lr=1.0)
    before = [param.clone() for param in ddp.module.parameters()]
    with pytest.raises(
        RuntimeError, match=r"ended backward 2 on rank 0 before the gradients of `scales.0`.*zero_grad"
    ):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(ddp.module.parameters(), before, strict=True))
    optimizer.zero_grad()
    optimizer.step()
    ddp.step(X)
    optimizer.step()


@pytest.mark.parametrize("changed", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_parameters_without_gradient_do_not_pass_for_cleared_ones(
    changed: dict[str, bool], num_steps_before: int
) -> None:
    """After an exception, in the first backward or later: one parameter is unused, another one's is undefined."""
    module = LeavesOut()
    ddp = FakeDDP(module, **changed)
    for _ in range(num_steps_before):
        ddp.step(X)
        module.zero_grad()
    ddp.fail(X)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match="An exception has ended backward"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def test_each_optimizer_has_to_clear_its_gradients() -> None:
    ddp = interrupted()
    cleared, other = (torch.optim.SGD([param], lr=1.0) for param in ddp.module.parameters())
    cleared.zero_grad()
    cleared.step()
    with pytest.raises(RuntimeError, match="An exception has ended backward"):
        other.step()
    other.zero_grad(set_to_none=False)
    other.step()


def test_an_optimizer_may_step_within_backward() -> None:
    """The guard is up then, for the case that an exception comes."""
    module = Scales([0, 1])
    ddp = FakeDDP(module)
    optimizers = {param: torch.optim.SGD([param], lr=1.0) for param in module.parameters()}
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())
    for _ in range(3):
        ddp.step(X)


def test_another_thread_may_step_meanwhile() -> None:
    """As a communication hook does whose future steps an optimizer."""
    module = Scales([0, 1])
    ddp = FakeDDP(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    steps: list[None] = []

    def step_in_another_thread(_param: torch.Tensor) -> None:
        with ThreadPoolExecutor(1) as other:
            steps.append(other.submit(optimizer.step).result())

    module.scales[0].register_post_accumulate_grad_hook(step_in_another_thread)
    ddp.step(X)
    assert len(steps) == 1


def test_gradients_of_another_backward_may_be_stepped_on_after_an_exception() -> None:
    """Of another wrapper that shares the parameters, perhaps."""
    ddp = interrupted()
    ddp.module.zero_grad()
    for param in ddp.module.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.SGD(ddp.module.parameters(), lr=1.0).step()


def test_the_optimizer_is_stopped_after_reductions_that_failed() -> None:
    class FailingWork:
        def wait(self) -> None:
            raise RuntimeError("Connection reset by peer.")

    module = nn.Linear(2, 2)
    ddp = FakeDDP(module)
    ddp.transport.all_reduce = lambda tensor: FailingWork()
    with pytest.raises(RuntimeError, match="Connection reset"):
        ddp.step(X)
    with pytest.raises(RuntimeError, match="An exception has ended backward 1 on rank 0, so"):
        torch.optim.SGD(module.parameters(), lr=1.0).step()
