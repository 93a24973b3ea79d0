"""Errors of the core that begin with torch's words, where scripts match on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from minddp.core.expectation import Expectation
from minddp.transport.protocols import Transport


class Unfinished(Protocol):
    """What happens when a backward has ended without some gradients; see watchdog/missing_gradients.py."""

    serial: str  # names the wrapper, the same on every rank

    def warn(self, missing: Sequence[int], rank: int) -> None:
        """A further backward may still bring the gradients of these parameters."""
        ...

    def guard(self, error: Callable[[], Exception]) -> None:
        """Let optimizers raise `error()` instead of stepping, until `lift_guard`."""
        ...

    def lift_guard(self) -> None: ...

    def error(
        self, missing: Sequence[int], transport: Transport, expectation: Expectation, num_passes: int
    ) -> Exception:
        """The next forward has begun without them."""
        ...


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


def nothing_to_finalize() -> RuntimeError:
    """The error for `finish` without a backward that awaits it."""
    return RuntimeError(
        "There is no backward to finalize: none was synchronised since the last one was finalized, or not all "
        "of its gradients have arrived. See `should_finalize_after_backward`."
    )


def not_finalized() -> RuntimeError:
    """The error for gradients that are used before `finalize_backward` was called."""
    return RuntimeError(
        "The last backward has not been finalized, so `.grad` holds gradients that are not averaged. Call "
        "finalize_backward(), or leave `require_manual_backward_finalization` at False."
    )
