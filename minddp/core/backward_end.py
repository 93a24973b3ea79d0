"""The end of a backward, and which of several backwards ends a pass.

[Note: which backward ends]
Usually one backward brings all gradients of a forward. Under reentrant checkpointing hooks also fire in backwards
that are nested in it. Each of them has an end, and only one end is that of the pass. The backward in which a
gradient enters at the outputs is the *main* one, until it ends. When a backward ends, `entry_of` decides:

| the backward that has ended | its entry |
|---|---|
| the main one | `AT_OUTPUTS`: the pass ends |
| another one, while the main one runs | `NESTED`: the pass goes on |
| there is no main one; it ran inside another backward, and its forward did not | `NESTED` |
| else: a gradient has entered in an earlier backward, or the outputs have no tensors to watch | `AT_OUTPUTS` |
| else | `ELSEWHERE`: the pass ends, but this does not complete a recording |

That holds while gradients are still missing. Once all buckets have been launched, nothing more can come, and the
next end finalizes the pass, even that of a nested backward.

A gradient that enters elsewhere is, for example, that of a penalty on a weight, computed before the loss.

Three places request the callback at the end: a gradient enters; the first hook of a pass, in case the outputs have
tensors that were not found; and the launch of the last bucket, since a complete pass may be finalized in a nested
backward.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from functools import partial

from minddp.core import autograd

#: The time that another thread of the engine may take to free the callbacks of a backward that has raised.
FREED_WITHIN_S = 1.0


class Entry(enum.Enum):
    """How a backward reached the parameters."""

    AT_OUTPUTS = "through the outputs of the forward, or outputs that cannot be watched"
    NESTED = "nested in the backward that ends the pass"
    ELSEWHERE = "not through the outputs of the forward"


class AwaitedEnds:
    """Calls `on_end(backward)` after each backward that has queued a callback, or `on_failure()` if it raised.

    Both are bound methods, whose objects are referenced weakly. A `BackwardPass` makes its own when a forward
    returns, in that thread: `main`, `entry_of` and `has_ended_here` are for the backwards of this forward.
    """

    def __init__(self, on_end: Callable[[int], None], on_failure: Callable[[], None] | None = None):
        self._on_end = autograd.weakly(on_end)
        self._on_failure = autograd.weakly(on_failure) if on_failure is not None else lambda: None
        self._awaited: set[int] = set()
        self.is_visible = False  # True if the outputs have tensors, so that a gradient is seen to enter there
        self.main: int | None = None  # the running backward in which a gradient has entered at the outputs
        self._has_entered = False  # in this backward or an earlier one
        self._thread = threading.get_ident()
        self._forward_was_nested = autograd.inside_another_backward()

    def queue_end_callback(self, *, at_outputs: bool = False) -> bool:
        """Returns False if the end of the running backward is awaited already.

        `at_outputs`: a gradient has entered at the outputs, so this may be the main backward.
        """
        backward = autograd.current_backward()
        if at_outputs and self.main is None:
            self.main, self._has_entered = backward, True
        if backward in self._awaited:
            return False
        self._awaited.add(backward)
        autograd.call_at_end_of_backward(partial(self._end, backward), partial(self._fail, backward))
        return True

    def _end(self, backward: int) -> None:
        try:
            self._on_end(backward)
        finally:
            self._forget(backward)

    def _fail(self, backward: int) -> None:
        self._on_failure()
        self._forget(backward)

    def _forget(self, backward: int) -> None:
        self._awaited.discard(backward)
        if backward == self.main:
            self.main = None

    def is_any_awaited(self, *, but: int = -1) -> bool:
        """True if the end of a backward other than `but` is awaited."""
        return bool(self._awaited - {but})

    @property
    def is_running_in_this_thread(self) -> bool:
        """True within a backward whose end is awaited."""
        return autograd.current_backward() in self._awaited

    def reset(self) -> None:
        """Await no end any more."""
        self._awaited.clear()
        self.main = None

    def entry_of(self, backward: int) -> Entry:
        """How a backward that has just ended reached the parameters. See [Note: which backward ends]."""
        if self.main is not None:
            return Entry.AT_OUTPUTS if backward == self.main else Entry.NESTED
        if autograd.inside_another_backward() and not self._forward_was_nested:
            return Entry.NESTED
        return Entry.AT_OUTPUTS if self._has_entered or not self.is_visible else Entry.ELSEWHERE

    @property
    def has_ended_here(self) -> bool:
        """True in the thread of the forward if no backward runs there: the awaited one has ended or raised."""
        return threading.get_ident() == self._thread and autograd.current_backward() < 0

    def wait_for_failures(self) -> None:
        """Wait a little for the engine to report an exception, unless an awaited backward runs in this thread."""
        limit = time.monotonic() + FREED_WITHIN_S
        while self.is_any_awaited() and autograd.current_backward() < 0 and time.monotonic() < limit:
            time.sleep(0.001)
