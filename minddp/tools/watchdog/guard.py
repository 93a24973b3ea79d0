"""The guard calls its checks around forward, backward and optimizers; `comparison.py` compares their notes.

A wrapper of minddp calls its guard by `Guarded`; for other modules see `observer.py`.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from minddp.core.autograd import weakly
from minddp.core.mode import Mode
from minddp.core.optimizer_steps import StepWatcher, steps_on
from minddp.extension import Extension
from minddp.platform import streams
from minddp.tools.watchdog.check import ALONE, Check, Finding
from minddp.tools.watchdog.comparison import NotesComparison
from minddp.tools.watchdog.drift import DriftCheck
from minddp.tools.watchdog.finite import NotFiniteCheck
from minddp.tools.watchdog.misuse import BypassCheck, NamedParams, SameDataCheck
from minddp.tools.watchdog.slow_rank import SlowRank
from minddp.transport.protocols import Transport

if TYPE_CHECKING:
    from minddp.ddp import DistributedDataParallel

_log = logging.getLogger(__name__)


class Guard(Mode, StepWatcher):
    """Calls `checks` around the steps of a module whose reduced parameters are `params`.

    Notes are compared from the first synchronised backward on, in which all ranks take part: a copy of the wrapper
    on one rank, which never trains, must not take the place of another rank's. This ends with `close`, or when the
    guard is collected.
    """

    steps_are_passes = False  # True: an optimizer's step is taken for the end of a synchronised backward

    def __init__(
        self,
        params: Sequence[tuple[str, torch.nn.Parameter]],
        transport: Transport,
        checks: MutableMapping[str, Check],
    ):
        self.checks = checks
        self._failed: list[Check] = []
        self._name = hashlib.blake2b(repr([name for name, _ in params]).encode(), digest_size=8).hexdigest()
        self._comparison = NotesComparison(transport, checks)
        self._device = params[0][1].device if params else torch.device("cpu")
        self._may_capture = streams.has_streams(self._device)
        self._guarded = {id(param) for _, param in params}
        # Where training is.
        self.step = 0  # synchronised backwards so far
        self._in_backward = False
        self._steps_alone = 0  # optimizer steps since the last synchronised backward
        self._stepping: int | None = None  # the id of the optimizer that was the first to step
        self.watch_steps()
        weakref.finalize(self, self._comparison.abandon).atexit = False
        self._group_end = transport.when_group_ends(weakly(self.close))

    @property
    def findings(self) -> Sequence[Finding]:
        """All findings so far, on rank 0."""
        return self._comparison.found

    def close(self) -> None:
        self.ignore_steps()
        self._comparison.close()

    def before_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.call("before_module", self.step, inputs, kwargs)

    def shadow_begins(self) -> None:
        self._count_backward()

    def first_gradient(self, param: int) -> None:
        self._steps_alone, self._in_backward = 0, True
        self.call("first_gradient", self.step)

    def _count_backward(self) -> None:
        """Count a reduced backward, on all ranks alike. With the first one, notes begin to be compared."""
        self._comparison.start(self._name)
        self.step += 1

    def before_unpack(self) -> None:
        self._count_backward()  # not before: a rank may drop a backward of which other ranks have no part
        self.call("before_unpack")

    def post_backward(self) -> None:
        self._in_backward = False
        self.call("post_backward")

    def call(self, method: str, *args: Any) -> None:
        """Call a method of the checks that have it. A check that fails is left out from then on."""
        if self._may_capture and streams.is_capturing(self._device):
            return
        for check in self.checks.values():
            if (look := getattr(check, method, None)) is None or check in self._failed:
                continue
            try:
                look(*args)
            except Exception:
                self._failed.append(check)
                check.release()
                _log.warning("A check of the guard has failed and is left out from now on.", exc_info=True)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.looks_at(optimizer):
            self._stepping = self._stepping or id(optimizer)
            if self.steps_are_passes and self._stepping == id(optimizer):
                self.first_gradient(-1)
                self._count_backward()
                self.post_backward()
            self.call("before_step", optimizer)
            self._steps_alone += 1
            if self._steps_alone == ALONE:
                self._comparison.start(f"{self._name}/alone")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.looks_at(optimizer):
            self.call("after_step", optimizer)

    def looks_at(self, optimizer: torch.optim.Optimizer) -> bool:
        """Not in backward, where each bucket may have its own step."""
        return not self._in_backward and steps_on(optimizer, self._guarded)


def checks_of(params: NamedParams, **drift: Any) -> dict[str, Check]:
    """The checks of a wrapper that reduces these parameters; they look at those on the device of the first."""
    named = [(name, param) for name, param in params if param.device == params[0][1].device]
    checks: dict[str, Check] = {
        "drift": DriftCheck(named, **drift),
        "bypass": BypassCheck(named),
        "same data": SameDataCheck(),
        "not finite": NotFiniteCheck(named),
    }
    if named and not streams.has_streams(named[0][1].device):
        checks["slow_rank"] = SlowRank()
    return checks


@dataclass(eq=False)
class Guarded(Extension):
    """Attaches a guard if there are other ranks, and a store to exchange notes with them."""

    shares: bool
    guard: Guard | None = field(default=None, init=False)

    def attach(self, ddp: DistributedDataParallel, *, starts_equal: bool) -> None:
        reducer = ddp._reducer
        transport = reducer.transport
        if transport.world_size == 1 or transport.store is None:
            return
        named = [(spec.name, param) for spec, param in zip(reducer.store.plan.params, reducer.params, strict=True)]
        checks = checks_of(named, starts_equal=starts_equal)
        if self.shares:  # ranks may have different numbers of them
            checks.pop("slow_rank", None)
        self.guard = Guard(named, transport, checks)
        reducer.modes.append(self.guard)
        if (hook := ddp._registered_hook) is not None:
            self.guard.call("communication_hook", hook.name, hook.state)

    def change_ranks(self, ddp: DistributedDataParallel) -> None:
        if self.guard is not None:
            self.guard.close()
            ddp._reducer.modes.remove(self.guard)
            self.guard = None
        self.attach(ddp, starts_equal=False)

    def pre_forward(self, ddp: DistributedDataParallel) -> None:
        if self.guard is not None:
            self.guard.call("pre_forward")

    def before_module(self, ddp: DistributedDataParallel, inputs: Any, kwargs: Any) -> None:
        if self.guard is not None:
            self.guard.before_module(inputs, kwargs)

    def post_forward(self, ddp: DistributedDataParallel) -> None:
        if self.guard is not None:
            self.guard.call("post_forward", ddp.require_backward_grad_sync)
