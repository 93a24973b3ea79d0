"""Several ranks in one process: modules that a step changes by hand, and each rank's checks and exchange."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from minddp.tools.watchdog.check import Check, Finding
from minddp.tools.watchdog.comparison import NotesComparison
from minddp.tools.watchdog.drift import DriftCheck
from minddp.tools.watchdog.misuse import BypassCheck
from tests.fakes import FakeTransport


class Fleet:
    """`world_size` replicas of `make_module()`. A step gives all of them equal gradients of its own number."""

    def __init__(
        self,
        world_size: int = 2,
        make_module: Callable[[], nn.Module] = lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))),
        *,
        starts_equal: bool = True,
    ):
        torch.manual_seed(0)
        module = make_module()
        self.modules = [copy.deepcopy(module) for _ in range(world_size)]
        self.optimizers = [torch.optim.SGD(module.parameters(), lr=0.125, momentum=0.5) for module in self.modules]
        self.checks: list[dict[str, Check]] = [
            {"drift": DriftCheck(params, starts_equal=starts_equal), "bypass": BypassCheck(params)}
            for params in ([*module.named_parameters()] for module in self.modules)
        ]
        store = dist.HashStore()
        self.exchanges = [
            NotesComparison(FakeTransport(world_size, rank, store=store), checks)
            for rank, checks in enumerate(self.checks)
        ]
        for exchange in self.exchanges:
            exchange.open("test")
        self.num_steps = 0

    def steps(self, number: int = 1, *, act: Callable[[int, int], object] | None = None) -> None:
        """Synchronised steps. `act(step, rank)` is called after backward, when gradients are averaged."""
        for _ in range(number):
            step = self.num_steps
            for rank in range(len(self.modules)):
                self.call(rank, "first_gradient", step)
                self.give_gradients(rank, step)
                if act is not None:
                    act(step, rank)
                self.call(rank, "post_backward")
                self.optimize(rank)
            self.num_steps += 1

    def call(self, rank: int, method: str, *args: object) -> None:
        for check in self.checks[rank].values():
            getattr(check, method, lambda *_: None)(*args)

    def give_gradients(self, rank: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for param in self.modules[rank].parameters():
            param.grad = torch.randn(param.shape, generator=generator)

    def optimize(self, rank: int) -> None:
        self.call(rank, "before_step", self.optimizers[rank])
        self.optimizers[rank].step()
        self.call(rank, "after_step", self.optimizers[rank])

    def step_alone(self, *seeds: int | None) -> None:
        """A step that is not synchronised, on gradients of each rank's seed; a rank without one skips it."""
        for rank, seed in enumerate(seeds):
            if seed is not None:
                self.give_gradients(rank, seed)
                self.optimize(rank)

    def alone(self, number: int, *, averages_every: int = 0) -> None:
        for turn in range(number):
            self.step_alone(*(1000 * turn + rank for rank in range(len(self.modules))))
            if averages_every and (turn + 1) % averages_every == 0:
                self.average()

    @torch.no_grad()
    def average(self) -> None:
        for params in zip(*(module.parameters() for module in self.modules), strict=True):
            mean = torch.stack(params).mean(0)
            for param in params:
                param.copy_(mean)

    def heal(self) -> None:
        """Give all ranks what rank 0 has."""
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            module.load_state_dict(copy.deepcopy(self.modules[0].state_dict()))
            optimizer.load_state_dict(copy.deepcopy(self.optimizers[0].state_dict()))

    def exchange(self, turns: int = 4, is_last: bool = False) -> list[Finding]:
        """What rank 0 has found after some turns of all ranks."""
        for _ in range(turns):
            for exchange in reversed(self.exchanges):
                exchange.turn(is_last)
        return self.exchanges[0].found

    def end(self) -> list[Finding]:
        """What it has found in the end."""
        return self.exchange(1, is_last=True)
