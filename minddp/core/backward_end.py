"""Which backward is running, is it nested in another one, and when does it end?

[Note: which backward ends]
A pass ends with the backward in which a gradient enters at the outputs. Under reentrant checkpointing hooks fire in
nested backwards, whose ends do not count. So the gradient that enters requests a callback at the end of its
backward. The first hook of a pass requests one, too, in case the outputs have tensors that were not found; and so
does the launch of the last bucket, since a complete pass may be finalized in a nested backward. If no gradient was
seen to enter, a backward inside another one counts as nested, unless the forward was inside one, too.

A backward that does not enter at the outputs, such as that of a penalty on a weight, is not the one that the
forward prepared for, although its gradients belong to the pass. It does not complete a recording.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from functools import partial

from minddp.core import autograd


class Entry(enum.Enum):
    """How a backward reached the parameters."""

    AT_OUTPUTS = "through the outputs of the forward, or outputs that cannot be watched"
    NESTED = "nested in the backward that ends the pass"
    ELSEWHERE = "not through the outputs of the forward"


class AwaitedEnds:
    """After a backward in which `await_end` was called, calls `on_end(backward)`, or `on_failure()` if it raised.

    Both are bound methods, whose objects are referenced weakly.
    """

    def __init__(self, on_end: Callable[[int], None], on_failure: Callable[[], None] | None = None):
        self._on_end = autograd.weakly(on_end)
        self._on_failure = autograd.weakly(on_failure) if on_failure is not None else lambda: None
        self._awaited: set[int] = set()

    def await_end(self) -> bool:
        """Returns False if the end of the running backward is awaited already."""
        backward = autograd.current_backward()
        if backward in self._awaited:
            return False
        self._awaited.add(backward)
        autograd.call_at_end_of_backward(partial(self._end, backward), partial(self._fail, backward))
        return True

    def _end(self, backward: int) -> None:
        try:
            self._on_end(backward)
        finally:
            self._awaited.discard(backward)

    def _fail(self, backward: int) -> None:
        self._awaited.discard(backward)
        self._on_failure()

    def is_any_awaited(self, *, but: int = -1) -> bool:
        """True if the end of a backward other than `but` is awaited."""
        return bool(self._awaited - {but})

    @property
    def is_awaited_here(self) -> bool:
        """True within a backward whose end is awaited."""
        return autograd.current_backward() in self._awaited

    def reset(self) -> None:
        """Await no end any more."""
        self._awaited.clear()


class PassEnds(AwaitedEnds):
    """The ends of the backwards that bring the gradients of one forward. Made in its thread when it returns."""

    def __init__(self, on_end: Callable[[int], None], on_failure: Callable[[], None]):
        super().__init__(on_end, on_failure)
        self.is_visible = False  # True if the outputs have tensors, so that a gradient is seen to enter there
        self._thread = threading.get_ident()
        self._forward_was_nested = autograd.inside_another_backward()
        self._entered = -1  # the backward in which a gradient entered at the outputs

    def enter(self) -> None:
        """A gradient enters at the outputs."""
        if self._entered not in self._awaited:
            self._entered = autograd.current_backward()

    def entry_of(self, backward: int) -> Entry:
        """How a backward that has just ended reached the parameters. See [Note: which backward ends]."""
        if self._entered in self._awaited:
            is_nested = backward != self._entered
        else:
            is_nested = autograd.inside_another_backward() and not self._forward_was_nested
        if is_nested:
            return Entry.NESTED
        return Entry.AT_OUTPUTS if self._entered >= 0 or not self.is_visible else Entry.ELSEWHERE

    @property
    def is_over_here(self) -> bool:
        """True in the thread of the forward if no backward runs there: the awaited one has ended or raised."""
        return threading.get_ident() == self._thread and autograd.current_backward() < 0
