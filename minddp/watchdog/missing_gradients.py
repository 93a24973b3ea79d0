"""A backward has ended and some parameters have no gradient: say which, as soon as it is certain.

[Note: unfinished reduction]
A backward that leaves parameters out is not an error yet: a second backward through another output may bring
the rest. It becomes one when the result is used. Torch notices at the next forward, one iteration
too late: the optimizer has then already stepped with gradients that were not reduced, and the ranks have
diverged. minddp warns when a backward ends unfinished, once for each set of parameters, and arms a guard on the
optimizers: a step that would touch one of the module's parameters raises. The next forward raises too, as in torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minddp.core.autograd import weakly
from minddp.core.expectation import Expectation
from minddp.platform.time_limits import values_within
from minddp.transport.protocols import Transport

PATIENCE_S = 1.0
_FACT = "Expected to have finished reduction in the prior iteration before starting a new one. "
_ALL_IS_SAID = (
    "These are all; no need to set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL.\n"
)
_OUTPUTS = "by making sure all `forward` function outputs participate in calculating loss"


def ask_what_is_missing(occasion: str, missing: str, transport: Transport, patience_s: float = PATIENCE_S) -> str:
    """Send the other ranks what is `missing` here and receive what is missing there, as lines of text.

    Goes through the store, since the collectives may be what is stuck. `occasion` is the same on every rank. A rank
    whose gradients are complete does not take part, so at most `patience_s` seconds are waited for it.
    """
    store, rank = transport.store, transport.rank
    if store is None or transport.world_size == 1:
        return ""
    keys = {other: f"minddp/unfinished/{occasion}/{other}" for other in range(transport.world_size)}
    store.set(keys.pop(rank), missing)
    missing_on = values_within(store, keys, patience_s)
    lines = []
    for other in keys:
        if other in missing_on:
            listed = missing_on[other].decode()
            lines.append(f"Parameters which did not receive grad for rank {other}: {listed}\n")
        else:
            lines.append(
                f"Rank {other} reports nothing missing: its gradients are complete and it waits, or it is late.\n"
            )
    return "".join(lines)


class OptimizerGuard:
    """While it is up, an optimizer that is about to step on one of `params` meets `error()` instead.

    If `error` is a method, its object is referenced weakly. See [Note: unfinished reduction].
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], error: Callable[[], Exception]):
        self._guarded = {id(param) for param in params}
        self._make_error = weakly(error) if isinstance(error, MethodType) else error
        # Weakly, since this may be collected at any moment, also while an optimizer calls its hooks.
        self._handle = register_optimizer_step_pre_hook(weakly(self._before_step))

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        stepped = (param for group in optimizer.param_groups for param in group["params"])
        if any(id(param) in self._guarded for param in stepped) and (error := self._make_error()) is not None:
            raise error

    def lift(self) -> None:
        self._handle.remove()


class UnfinishedReduction:
    """Gradients of a wrapper that have not arrived: warning, guard and error. See [Note: unfinished reduction].

    `serial` names the wrapper, the same on every rank.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], names: Sequence[str], serial: str):
        self.serial = serial
        self._params = params
        self._names = names
        self._guard: OptimizerGuard | None = None
        self._warned_of: set[tuple[int, ...]] = set()

    def guard(self, error: Callable[[], Exception]) -> None:
        """Keep optimizers from stepping on the parameters until `lift_guard`."""
        self._guard = OptimizerGuard(self._params, error)

    def lift_guard(self) -> None:
        if self._guard is not None:
            self._guard.lift()
            self._guard = None

    @property
    def is_guarded(self) -> bool:
        return self._guard is not None

    def warn(self, missing: Sequence[int], rank: int) -> None:
        """A further backward may still bring the gradients. Once for each set of parameters."""
        if tuple(missing) not in self._warned_of:
            self._warned_of.add(tuple(missing))
            warnings.warn(
                f"This backward has brought no gradient on rank {rank} for: {self._listed(missing)}. Until they "
                f"come in a further backward, `.grad` is not averaged, and an optimizer's step or the next forward "
                f"will be an error that says what to do.\n{self._frozen(missing)}",
                stacklevel=2,
            )

    def error(
        self, missing: Sequence[int], transport: Transport, expectation: Expectation, num_passes: int
    ) -> RuntimeError:
        rank, listed = transport.rank, self._listed(missing)
        elsewhere = ask_what_is_missing(f"{self.serial}/{num_passes}", listed, transport)
        remedy = "Pass static_graph=False. " if expectation.is_static else ""
        return RuntimeError(
            f"{_FACT}{_why(expectation)}.\n"
            f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}\n"
            f"Parameters which did not receive grad for rank {rank}: {listed}\n"
            f"{self._frozen(missing)}{elsewhere}{_ALL_IS_SAID}"
            f"{remedy}Until that is mended `.grad` on rank {rank} holds gradients that are not averaged."
        )

    def _listed(self, params: Sequence[int]) -> str:
        return ", ".join(self._names[param] for param in params)

    def _frozen(self, missing: Sequence[int]) -> str:
        """What is known of the reason: a line of text, or nothing."""
        frozen = [param for param in missing if not self._params[param].requires_grad]
        then = "They required grad when the module was wrapped, but no longer do"
        return f"{then}: {self._listed(frozen)}\n" if frozen else ""


def _why(expectation: Expectation) -> str:
    if expectation.is_static:
        return (
            "This error indicates that your training graph has changed in this iteration, e.g., one parameter "
            "is used in first iteration, but then got unused in the second iteration. this is not compatible "
            "with static_graph set to True"
        )
    unused = "This error indicates that your module has parameters that were not used in producing loss. "
    if expectation.finds_unused:
        return (
            f"{unused}Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` "
            f"outputs participate in computing loss. You can fix this {_OUTPUTS}"
        )
    return (
        f"{unused}You can enable unused parameter detection by passing the keyword argument "
        f"`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and {_OUTPUTS}"
    )
