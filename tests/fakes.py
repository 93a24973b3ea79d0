"""Stand-ins for ranks: a transport that records its calls, and a reducer that needs no process group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minddp.core.events import Event, EventKind
from minddp.ddp import DistributedDataParallel
from minddp.modes.divisor import Divisor
from minddp.options import Options
from minddp.strategies import make_reducer
from minddp.tools.watchdog.finite import CheckFinite


class FakeWork:
    """A collective that acts when it is waited for, so that a wait left out shows in the values."""

    def __init__(self, complete: Callable[[], object]):
        self._complete = complete
        self._done = False

    def wait(self) -> None:
        if not self._done:
            self._done = True
            self._complete()


class FakeTransport:
    """One rank of `world_size` whose peers all hold what it holds.

    `calls` lists the calls, in order: `("all_reduce", numel)`, `("broadcast", numel)`, ... With
    `from_rank_0`, a broadcast brings that tensor instead of leaving this rank's own. Transports that are given
    one `store` are ranks of one group in that respect.
    """

    adds_after_s = 0.0

    def __init__(
        self,
        world_size: int = 2,
        rank: int = 0,
        from_rank_0: torch.Tensor | None = None,
        store: dist.Store | None = None,
    ):
        self.store = store
        self.world_size = world_size
        self.rank = rank
        self.from_rank_0 = from_rank_0
        self.calls: list[tuple[str, int]] = []

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor) -> FakeWork:
        self.calls.append(("all_reduce", tensor.numel()))
        return FakeWork(lambda: tensor.mul_(self.world_size))

    def broadcast(self, tensor: torch.Tensor, source: int) -> FakeWork:
        self.calls.append((f"broadcast from {source}", tensor.numel()))
        other = self.from_rank_0
        return FakeWork(lambda: None if other is None else tensor.copy_(other))

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        self.calls.append(("all_gather", tensor.numel()))
        return [tensor.clone() for _ in range(self.world_size)]

    def when_group_ends(self, _end: Callable[[], object]) -> None:
        return None

    def count(self, call: str) -> int:
        return sum(name == call for name, _ in self.calls)


def options(**changed: Any) -> Options:
    """The constructor's defaults, with `changed`."""
    parameters = inspect.signature(DistributedDataParallel).parameters
    assert changed.keys() <= parameters.keys()
    return Options.checked({name: parameter.default for name, parameter in parameters.items()} | changed)


class FakeDDP:
    """A module, its reducer and the events so far: the wrapper without process group and buffers.

    `changed` are options of the wrapper, without its tools but `check_finite`.
    """

    def __init__(
        self,
        module: nn.Module,
        transport: FakeTransport | None = None,
        *,
        check_finite: bool = False,
        **changed: Any,
    ):
        self.module = module
        self.transport = transport or FakeTransport()
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        divisor = Divisor(self.transport).for_this_backward
        self.reducer = make_reducer(options(**changed), named, (), self.transport, divisor)
        if check_finite:
            self.reducer.modes.append(CheckFinite(self.reducer))
        self.events: list[Event] = []
        self.reducer.events.watch(self.events.append)

    def __call__(self, *inputs: Any, sync: bool = True, finalize_at_end: bool = True) -> Any:
        """A forward as the wrapper makes it; `sync=False` as under `no_sync`."""
        self.reducer.ensure_finished()
        self.reducer.rebuild_if_due()
        output = self.module(*inputs)
        if sync:
            self.reducer.finalizes_at_end = finalize_at_end
            self.reducer.prepare_for_backward(output)
        return output

    def step(self, *inputs: Any) -> None:
        self(*inputs).sum().backward()

    def fail(self, *inputs: Any) -> None:
        """A step whose backward raises, of a module that is `explosive`."""
        self.module.explosive.arm()
        with pytest.raises(KeyError, match="exploded"):
            self.step(*inputs)
        self.module.explosive.arm(False)

    def take_events(self, *kinds: EventKind) -> list[str]:
        """Events of these kinds since the last call, as text; all kinds if none is given."""
        chosen = [str(event) for event in self.events if not kinds or event.kind in kinds]
        self.events.clear()
        return chosen
