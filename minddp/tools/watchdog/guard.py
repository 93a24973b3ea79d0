"""The guard's checks note what they see around forward, backward and optimizers, for `exchange.py` to compare."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from minddp.core.autograd import weakly
from minddp.core.mode import Mode
from minddp.core.optimizer_steps import StepWatcher, steps_on
from minddp.platform import streams
from minddp.tools.watchdog.check import ALONE, Check, is_looked_at
from minddp.tools.watchdog.exchange import Exchange
from minddp.transport.protocols import Transport

_log = logging.getLogger(__name__)


class Guard(Mode, StepWatcher):
    """Calls `checks` around the steps of a module whose reduced parameters are `params`.

    Its exchange begins with the first synchronised backward, which is the same on all ranks: a copy of the wrapper
    on one rank, which never trains, must not take the place of another rank's. It ends with `close`, or when the
    guard is collected. `num_passes`: how many backwards the reducer has synchronised before. The wrapper need not
    call unless `looks`; see [Note: steps that are looked at].
    """

    def __init__(
        self,
        params: Sequence[tuple[str, torch.nn.Parameter]],
        transport: Transport,
        checks: MutableMapping[str, Check],
        *,
        raises: bool,
        num_passes: int = 0,
    ):
        assert transport.store is not None
        self.looks = True
        self.checks = checks
        self._failed: list[Check] = []
        self._name = hashlib.blake2b(repr([name for name, _ in params]).encode(), digest_size=8).hexdigest()
        self.exchange = Exchange(transport.rank, transport.world_size, checks, transport.store, raises=raises)
        self._first_pass = num_passes
        self._step = 0
        self._in_backward = False
        self._steps_alone = 0
        self._optimizer_steps: Counter[int] = Counter()  # in steps since the last one looked at, by id
        device = params[0][1].device if params else torch.device("cpu")
        self._stream_device = device if streams.has_streams(device) else None
        self._guarded = {id(param) for _, param in params}
        self.watch_steps()
        weakref.finalize(self, self.exchange.abandon).atexit = False
        self._group_end = transport.when_group_ends(weakly(self.close))

    def close(self) -> None:
        self.ignore_steps()
        self.exchange.close()

    def before_forward(
        self,
        num_passes: int,
        synchronised: Mapping[str, torch.Tensor],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """`synchronised` are the buffers that this forward has just been given.

        Raises:
            ReplicasDrift: see `Exchange.raise_if_due`.
        """
        self._step = num_passes - self._first_pass
        self.exchange.raise_if_due(self._step)
        if synchronised:
            self.call("buffers_synchronised", self._step, synchronised)
        self.call("before_forward", self._step, inputs, kwargs)

    def shadow_begins(self) -> None:
        """Begin with the first backward that is reduced, also on a rank that has joined."""
        self.exchange.open(self._name)

    def opened(self, param: int) -> None:
        step, self._steps_alone, self._in_backward = self._step, 0, True
        self._step = self.exchange.step = step + 1
        self.looks = is_looked_at(step)
        if self.looks:
            self.shadow_begins()
            self.call("backward_begins", step, max(self._optimizer_steps.values(), default=0))
            self._optimizer_steps.clear()

    def before_unpack(self) -> None:
        if self.looks:
            self.call("backward_computed")

    def closed(self) -> None:
        self._in_backward = False
        if self.looks:
            self.call("backward_over")
        elif self.exchange.pending is not None or is_looked_at(self._step):
            self.looks = True
            self.call("step_begins")

    def call(self, method: str, *args: Any) -> None:
        """Call a method of those checks that have it. One that fails must not end a training: it is left out."""
        if self._stream_device is not None and streams.is_capturing(self._stream_device):
            return
        for check in [one for one in self.checks.values() if hasattr(one, method) and one not in self._failed]:
            try:
                getattr(check, method)(*args)
            except Exception:
                self._failed.append(check)
                _log.warning("A check of the guard has failed and is left out from now on.", exc_info=True)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not steps_on(optimizer, self._guarded):
            return
        if not self._in_backward:  # else each bucket has a step of its own
            self._optimizer_steps[id(optimizer)] += 1
            self._steps_alone += 1
            self.looks = self.looks or self._steps_alone > 1
        if self.looks:
            self.call("optimizer_begins", optimizer)
            if self._steps_alone == ALONE:
                self.exchange.open(f"{self._name}/alone")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.looks and steps_on(optimizer, self._guarded):
            self.call("optimizer_over", optimizer)
