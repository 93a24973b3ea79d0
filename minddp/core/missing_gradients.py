"""A backward has ended and some parameters have no gradient: say which, as early as it is certain.

[Note: unfinished reduction]
A backward that leaves parameters out is not an error yet: a second backward through another output may bring
the rest. It becomes one when the result is used. Torch notices at the next forward, one iteration
too late: the optimizer has then already stepped with gradients that were not reduced, and the ranks have
parted. minddp warns when a backward ends unfinished, once for each set of parameters, and arms a guard on the
optimizers: a step that would touch one of the module's parameters raises. The next forward raises too, as in torch.
"""

from __future__ import annotations

import hashlib
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minddp.core.autograd import weakly
from minddp.core.expectation import Expectation
from minddp.transport.protocols import Transport

_FACT = "Expected to have finished reduction in the prior iteration before starting a new one. "
_ALL_IS_SAID = (
    "These are all; no need to set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL.\n"
)
_OUTPUTS = "by making sure all `forward` function outputs participate in calculating loss"


@dataclass(frozen=True)
class Missing:
    """The parameters that rank `rank` has no gradient for: indices into `names`, the names of all parameters.

    `frozen` are those among them that no longer require grad.
    """

    rank: int
    indices: tuple[int, ...]
    names: tuple[str, ...]
    frozen: tuple[int, ...] = ()

    def listed(self) -> str:
        return ", ".join(self.names[index] for index in self.indices)

    def why(self) -> str:
        """What is known of the reason: a line of text, or nothing."""
        if not self.frozen:
            return ""
        listed = ", ".join(self.names[index] for index in self.frozen)
        return f"They required grad when the module was wrapped, but no longer do: {listed}\n"


def unfinished_reduction(
    missing: Missing, elsewhere: str, *, static_graph: bool, finds_unused: bool
) -> RuntimeError:
    """The error for a reduction that lacks gradients; `elsewhere` tells of the other ranks."""
    remedy = ""
    if static_graph:
        remedy = "Pass static_graph=False. "
        why = (
            "This error indicates that your training graph has changed in this iteration, e.g., one parameter "
            "is used in first iteration, but then got unused in the second iteration. this is not compatible "
            "with static_graph set to True"
        )
    elif finds_unused:
        why = (
            "This error indicates that your module has parameters that were not used in producing loss. Since "
            "`find_unused_parameters=True` is enabled, this likely  means that not all `forward` outputs "
            f"participate in computing loss. You can fix this {_OUTPUTS}"
        )
    else:
        why = (
            "This error indicates that your module has parameters that were not used in producing loss. You "
            "can enable unused parameter detection by passing the keyword argument "
            f"`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and {_OUTPUTS}"
        )
    return RuntimeError(
        f"{_FACT}{why}.\n"
        f"Parameter indices which did not receive grad for rank {missing.rank}: "
        f"{' '.join(map(str, missing.indices))}\n"
        f"Parameters which did not receive grad for rank {missing.rank}: {missing.listed()}\n"
        f"{missing.why()}"
        f"{elsewhere}"
        f"{_ALL_IS_SAID}"
        f"{remedy}Until that is mended `.grad` on rank {missing.rank} holds gradients that are not averaged."
    )


def not_yet_finished(missing: Missing) -> str:
    """The warning at the end of a backward that lacks gradients, while a further backward may still bring them."""
    return (
        f"This backward has brought no gradient on rank {missing.rank} for: {missing.listed()}. Until they come in "
        f"a further backward, `.grad` is not averaged, and an optimizer's step or the next forward will be an "
        f"error that says what to do.\n{missing.why()}"
    )


def exchange_missing(
    store: dist.Store | None, occasion: str, missing: Missing, world_size: int, patience_s: float = 1.0
) -> str:
    """Send the other ranks what is missing here and receive what is missing there, as lines of text.

    Goes through the store, since the collectives may be what is stuck. A rank whose gradients are complete
    does not take part, so no more than `patience_s` seconds are waited for it.
    """
    if store is None or world_size == 1:
        return ""
    keys = {rank: f"minddp/unfinished/{occasion}/{rank}" for rank in range(world_size)}
    store.set(keys[missing.rank], missing.listed())
    deadline = time.monotonic() + patience_s
    others = [rank for rank in keys if rank != missing.rank]
    while not store.check([keys[rank] for rank in others]) and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = []
    for rank in others:
        if store.check([keys[rank]]):
            lines.append(
                f"Parameters which did not receive grad for rank {rank}: {store.get(keys[rank]).decode()}\n"
            )
        else:
            lines.append(
                f"Rank {rank} reports nothing missing: its gradients are complete and it waits, or it is late.\n"
            )
    return "".join(lines)


def ready_twice(index: int, name: str, *, static_graph: bool) -> RuntimeError:
    """The error for a parameter whose hook fired more often in one backward than it should."""
    if static_graph:
        return RuntimeError(
            f"Your training graph has changed in this iteration, e.g., one parameter is unused in first "
            f"iteration, but then got used in the second iteration. this is not compatible with static_graph "
            f"set to True. The parameter is `{name}` (index {index}); pass static_graph=False."
        )
    return RuntimeError(
        f"Expected to mark a variable ready only once. Parameter at index {index} with name {name} has been "
        f"marked as ready twice: its gradient was accumulated more than once in this backward. That happens "
        f"when it is used outside `forward`, when several reentrant `checkpoint` calls share it, or when it "
        f"was found unused and then used in a nested backward. Use checkpoint(..., use_reentrant=False), or "
        f"static_graph=True if every iteration has the same graph."
    )


def still_running() -> RuntimeError:
    """The error for a forward within a backward of the same wrapper."""
    return RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one: a backward of "
        "this wrapper is still running, and has called its forward, in a hook perhaps. Call the module there, "
        "without its wrapper, or wait until backward has ended."
    )


def not_finalized() -> RuntimeError:
    """The error for gradients that are used before `finalize_backward` was called."""
    return RuntimeError(
        "The last backward has not been finalized, so `.grad` holds gradients that are not averaged. Call "
        "finalize_backward(), or leave `require_manual_backward_finalization` at False."
    )


class OptimizerGuard:
    """While it is up, an optimizer that is about to step on one of `params` meets `error()` instead.

    If `error` is a method, its object is referenced weakly. See [Note: unfinished reduction].
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], error: Callable[[], Exception]):
        ours = {id(param) for param in params}
        make_error = weakly(error) if isinstance(error, MethodType) else error

        def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            stepped = (param for group in optimizer.param_groups for param in group["params"])
            if any(id(param) in ours for param in stepped):
                error = make_error()
                if error is not None:
                    raise error

        self._handle = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, self._handle.remove).atexit = False

    def lift(self) -> None:
        self._handle.remove()


class UnfinishedReduction:
    """Gradients of a wrapper that have not arrived: warning, guard and error. See [Note: unfinished reduction].

    `serial` names the wrapper, the same on every rank.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], names: Sequence[str], serial: str):
        self.serial = serial
        self._params = params
        self._names = tuple(names)
        self._guard: OptimizerGuard | None = None
        self._warned_of: set[tuple[int, ...]] = set()

    def warn(self, missing: Sequence[int], rank: int) -> None:
        """Once for each set of parameters."""
        if tuple(missing) not in self._warned_of:
            self._warned_of.add(tuple(missing))
            warnings.warn(not_yet_finished(self._missing(missing, rank)), stacklevel=2)

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

    def error(
        self, missing: Sequence[int], transport: Transport, expectation: Expectation, num_passes: int
    ) -> RuntimeError:
        here = self._missing(missing, transport.rank)
        elsewhere = exchange_missing(transport.store, f"{self.serial}/{num_passes}", here, transport.world_size)
        return unfinished_reduction(
            here, elsewhere, static_graph=expectation.is_static, finds_unused=expectation.finds_unused
        )

    def _missing(self, missing: Sequence[int], rank: int) -> Missing:
        frozen = tuple(param for param in missing if not self._params[param].requires_grad)
        return Missing(rank, tuple(missing), self._names, frozen)


def serial_number(names: Sequence[str], transport: Transport) -> str:
    """A name for a wrapper that is the same on every rank, and another one for each wrapper, even of equal models."""
    model = hashlib.blake2b(repr(list(names)).encode(), digest_size=8).hexdigest()
    store = transport.store
    return model if store is None else f"{model}/{store.add(f'minddp/{model}/{transport.rank}', 1)}"
