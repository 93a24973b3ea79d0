"""Warnings and errors for gradients that were not averaged: some never came, or backward raised an exception.

[Note: unfinished reduction]
A backward that leaves parameters out is not an error yet: a second backward through another output may bring the
missing gradients. It becomes an error when the result is used. Torch notices at the next forward, when the
optimizer has already stepped on gradients that were not reduced. minddp warns when a backward ends unfinished, once
for each set of parameters, and an optimizer step on one of the module's parameters raises. The next forward raises,
too, as in torch. A step on gradients that an exception in backward has left raises as well: they are not averaged,
or only in part. A script that catches the exception and clears them may continue.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from minddp.core.backward_pass import Phase
from minddp.core.errors import interrupted, still_running
from minddp.core.events import EventKind
from minddp.core.optimizer_steps import StepWatcher, steps_on
from minddp.core.usage_tracker import UsageTracker
from minddp.platform.store import Messages
from minddp.transport.protocols import DropsTogether, Transport

if TYPE_CHECKING:
    from minddp.core.reducer import Reducer

_log = logging.getLogger(__name__)
DROP_LIMIT_S = 60.0  # for all ranks to drop a backward that an exception has interrupted
_FACT = "Expected to have finished reduction in the prior iteration before starting a new one. "
_NOT_FINALIZED = (
    "Expected to have finalized the prior backward pass before starting a new one: `.grad` holds gradients that "
    "are not averaged. Call finalize_backward(), or leave `require_manual_backward_finalization` at False."
)
_OUTPUTS = "by making sure all `forward` function outputs participate in calculating loss"


class UnfinishedReduction(StepWatcher):
    """Watches the optimizer steps on `params` of one wrapper, which `serial` names on every rank."""

    def __init__(self, params: Sequence[torch.nn.Parameter], names: Sequence[str], serial: str):
        self.serial = serial
        self._params = params
        self._names = names
        self._guarded = {id(param) for param in params}
        self._warned_of: set[object] = set()

    def watch(self, reducer: Reducer) -> None:
        """Check each optimizer step from now on."""
        self._reducer = weakref.ref(reducer)
        self.watch_steps()
        self.settled(reducer.transport)

    def before_step(self, optimizer: Optimizer) -> None:
        reducer = self._reducer()
        if reducer is None or reducer.current is None or not steps_on(optimizer, self._guarded):
            return
        if reducer.current.is_unfinished:
            raise self.error(reducer)
        if (left := self._left_by_exception(reducer)) and steps_on(optimizer, left):
            missing = [self._names[param] for param in reducer.current.missing()]
            raise reducer.events.report(
                RuntimeError(
                    f"{interrupted(reducer.num_passes, reducer.transport.rank, missing)}, so `.grad` holds "
                    f"gradients that are not averaged, or only in part. Clear them (`optimizer.zero_grad()`) and "
                    f"leave this step out, on every rank."
                )
            )

    def _left_by_exception(self, reducer: Reducer) -> set[int]:
        """The ids of parameters whose gradients an exception in backward has left, and no one has cleared."""
        current = reducer.current
        if current is None or current.phase in (Phase.PREPARED, Phase.FINISHED):
            return set()
        if current.phase is not Phase.FINALIZING and current.ends.has_ended_here and not current.has_raised:
            raise reducer.events.report(still_running())
        return {
            id(param)
            for param, reference in (current.grads_left or {}).items()
            if (grad := param.grad) is not None and reference() is grad and bool(grad.any())
        }

    def settled(self, transport: Transport) -> None:
        """All ranks have come as far as here. From now on launched collectives are counted for `agree_to_drop`."""
        if isinstance(transport, DropsTogether):
            transport.settle()

    def agree_to_drop(self, transport: Transport, num_passes: int, num_launched: int) -> None:
        """Return once all ranks drop this backward; without waiting if it has launched nothing."""
        if not num_launched:
            _log.warning(
                f"{interrupted(num_passes, transport.rank, ())} before a bucket was reduced. The next one takes "
                f"its place: if the other ranks do not drop theirs, too, this rank's steps and learning rate lag "
                f"behind from now on. Let the exception end the script, or raise it on every rank.",
            )
        if isinstance(transport, DropsTogether):
            transport.agree_to_drop()
        elif transport.store is not None and num_launched:  # the same without a diagnosis
            messages = Messages(transport.store, "minddp/dropped", transport.rank, transport.world_size)
            try:
                messages.arrive(self.serial, num_passes, num_launched, limit_s=DROP_LIMIT_S)(math.inf)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{interrupted(num_passes, transport.rank, ())}. The next forward drops that backward, which "
                    f"all ranks have to do together. {error} Let an exception in backward end the script, or raise "
                    f"it on every rank."
                ) from error

    def warn(self, missing: Sequence[int], rank: int) -> None:
        """Warn once for each set of parameters: a later backward may still bring the gradients."""
        self._warn_once(
            tuple(missing),
            f"This backward has produced no gradient on rank {rank} for: {self._listed(missing)}. Until a "
            f"further backward brings them, `.grad` is not averaged, and an optimizer step or the next forward "
            f"raises an error with a remedy.\n{self._frozen(missing)}",
        )

    def warn_of_local(self, param: int, rank: int) -> None:
        """Warn once for each `param`: after a synchronised forward its gradient stays local, as in torch."""
        self._warn_once(
            ("local", param),
            f"Gradients of this backward were not averaged on rank {rank}, such as that of `{self._names[param]}`: "
            f"one backward since the last forward has been reduced, and no further one is. Call backward before "
            f"the next forward, or once on the sum of the losses. If the gradients are to stay local, call the "
            f"wrapper under `no_sync`.",
        )

    def warn_of_static(self, param: int, rank: int) -> None:
        """Warn once: a gradient is accumulated that no synchronised backward averages, as in torch."""
        self._warn_once(
            "static",
            f"static_graph: rank {rank} accumulates a gradient of `{self._names[param]}`, which no rank used in "
            f"the recorded backward. It is never averaged. Pass find_unused_parameters=True instead.",
        )

    def warn_of_early(self, rank: int) -> None:
        """Warn once: a backward whose forward ran under `no_sync` is reduced, as in torch."""
        self._warn_once(
            "early",
            f"Rank {rank} reduces a backward although its forward ran under `no_sync`: an earlier forward, which "
            f"was synchronised, had no backward. If that was not so on every rank, reductions of different steps "
            f"are paired. Run a forward without a backward under torch.no_grad().",
        )

    def _warn_once(self, occasion: object, text: str) -> None:
        if occasion not in self._warned_of:
            self._warned_of.add(occasion)
            _log.warning(text)

    def error(self, reducer: Reducer) -> Exception:
        if reducer.phase is Phase.REDUCING:
            return reducer.events.report(RuntimeError(_NOT_FINALIZED))
        assert reducer.current is not None, "there is nothing to finish"
        reducer.current.is_refused = True
        reducer.events.emit(EventKind.ERROR)
        missing, rank = reducer.current.missing(), reducer.transport.rank
        listed = self._listed(missing)
        remedy = "Pass static_graph=False. " if reducer.usage_tracker.is_static else ""
        return reducer.events.report(
            RuntimeError(
                f"{_FACT}{_why(reducer.usage_tracker)}.\n"
                f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}\n"
                f"Parameters which did not receive grad for rank {rank}: {listed}\n"
                f"{self._frozen(missing)}These are all; no need to set the environment variable "
                f"TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL.\n"
                f"{remedy}`.grad` on rank {rank} holds gradients that are not averaged."
            )
        )

    def _listed(self, params: Sequence[int]) -> str:
        return ", ".join(self._names[param] for param in params)

    def _frozen(self, missing: Sequence[int]) -> str:
        """A line about parameters that no longer require grad, if any."""
        frozen = [param for param in missing if not self._params[param].requires_grad]
        then = "They required grad when the module was wrapped, but no longer do"
        return f"{then}: {self._listed(frozen)}\n" if frozen else ""


def _why(usage_tracker: UsageTracker) -> str:
    if usage_tracker.is_static:
        return (
            "This error indicates that your training graph has changed in this iteration, e.g., one parameter "
            "is used in first iteration, but then got unused in the second iteration. this is not compatible "
            "with static_graph set to True"
        )
    unused = "This error indicates that your module has parameters that were not used in producing loss. "
    if usage_tracker.finds_unused:
        return (
            f"{unused}Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` "
            f"outputs participate in computing loss. You can fix this {_OUTPUTS}"
        )
    return (
        f"{unused}You can enable unused parameter detection by passing the keyword argument "
        f"`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and {_OUTPUTS}"
    )
