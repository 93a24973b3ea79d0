"""When the buckets of a plan get their memory, and what the first ones do to gradients that exist."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import minddp
from minddp.core.events import EventKind
from minddp.modes.join import shadow_backward
from tests.fakes import FakeDDP, FakeTransport


class CountingTransport(FakeTransport):
    """Notes what it was asked to allocate."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.calls.append(("allocate", numel))
        return super().allocate(numel, dtype, device)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_memory_comes_with_the_plan() -> None:
    ddp = FakeDDP(two_layers(), CountingTransport())
    assert ddp.transport.calls == [("allocate", 13)]
    assert len(ddp.reducer.buckets) == 1


def test_lazily_it_comes_with_the_first_backward_that_is_synchronised() -> None:
    ddp = FakeDDP(two_layers(), CountingTransport(), lazy_bucket_allocation=True, bucket_cap_mb=0)
    x = torch.ones(1, 2)
    ddp(x, sync=False).sum().backward()
    assert (ddp.transport.calls, ddp.reducer.buckets) == ([], [])
    output = ddp(x)
    assert ddp.transport.calls == []
    output.sum().backward()
    assert ddp.transport.calls == [("allocate", 13), ("all_reduce", 13)]
    ddp.step(x)  # a rebuild asks for its memory itself
    assert ddp.transport.count("allocate") == 1 + 4


def test_lazily_a_rank_without_inputs_makes_them_too() -> None:
    ddp = FakeDDP(two_layers(), CountingTransport(), lazy_bucket_allocation=True)
    shadow_backward(ddp.reducer)
    assert ddp.transport.calls == [("allocate", 13), ("all_reduce", 13)]


def test_a_rebuild_lets_go_of_the_old_memory_first() -> None:
    alive: list[int] = []

    class Watching(CountingTransport):
        def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            alive.append(len(ddp.reducer.buckets) if self.calls else 0)
            return super().allocate(numel, dtype, device)

    ddp = FakeDDP(two_layers(), Watching())
    for _ in range(2):
        ddp.step(torch.ones(1, 2))
    assert alive == [0, 0]


def test_who_begins_to_watch_late_hears_of_no_end_whose_launch_it_has_missed() -> None:
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
    assert ddp.told(EventKind.BUCKET_COMPLETED) == ["bucket completed: 0"]


def _trains_alike(rank: int, lazy: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    ddp = minddp.DistributedDataParallel(module, lazy_bucket_allocation=lazy, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        torch.manual_seed(10 * rank + step)
        x = torch.randn(5, 4)
        if step == 0:
            with ddp.no_sync():  # gradients exist when the first buckets are made
                ddp(x).square().sum().backward()
        ddp(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [param.detach() for param in ddp.parameters()]


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"transport": "shared_memory"}, {"static_graph": True}],
    ids=["default", "views", "shared memory", "static"],
)
def test_when_they_are_made_decides_no_bits(ranks: Any, options: dict[str, Any]) -> None:
    for eager, lazy in zip(*(ranks(3).run(_trains_alike, lazy, options) for lazy in (False, True)), strict=True):
        assert all(map(torch.equal, eager, lazy))
