"""Which backward is running, is it nested in another one, and when is it over.

[Note: which backward ends]
A pass ends with the backward in which a gradient enters at the outputs. Under reentrant checkpointing, hooks fire
in backwards that are nested in that one, and the end of a nested backward is not the end. The entering gradient
queues the end-of-backward callback first. The first hook of a pass asks too, in case the outputs hold tensors where
none were found, and so does the launch of the last bucket: what is complete may be finalized in a nested backward.
If no gradient was seen to enter, a backward inside another one counts as nested, unless the forward was inside one.

A backward that does not come in at the outputs, such as one of a penalty on a weight, is not the one that the
forward announced, although its gradients belong to the pass. It completes no recording: `came_in_at_outputs`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from minddp.core import autograd


class BackwardEnd:
    """Calls `on_begin(is_rest)` when a gradient enters at the outputs, and `on_end(is_nested)` after a backward.

    `is_rest`: it enters at another output of the forward whose backward was awaited last. `on_failure()` is called
    in place of `on_end` if the backward raises.

    They are methods; their object is referenced weakly by the outputs. `came_in_at_outputs`: a gradient has entered
    there, or cannot be seen to. `futures` (what has a method `wait`, such as those of a buffer hook) are waited for
    before backward returns.
    """

    def __init__(
        self,
        on_end: Callable[[bool], None],
        on_begin: Callable[[bool], None] | None = None,
        on_failure: Callable[[], None] | None = None,
    ):
        self._on_begin = autograd.weakly(on_begin) if on_begin is not None else None
        self._on_end = autograd.weakly(on_end)
        self._on_failure = autograd.weakly(on_failure) if on_failure is not None else lambda: None
        self._awaited: set[int] = set()
        self._entered = self._entered_again = -1  # the backward at whose end the pass ends; one that came later
        self._forward_was_nested = False
        self.came_in_at_outputs = True
        self._thread = 0
        self._num_forwards = self._last_awaited = 0
        self.futures: list[Any] = []

    def watch(self, output: Any, *, before_other_hooks: bool = False) -> None:
        """A forward has returned `output`: notice when a backward enters there."""
        self._thread = threading.get_ident()
        self._forward_was_nested = autograd.inside_another_backward()
        self._num_forwards += 1
        self.came_in_at_outputs = not autograd.call_when_gradient_enters(
            output, self._on_entrance, self._num_forwards, before_other_hooks=before_other_hooks
        )

    def _on_entrance(self, forward: int, at_new_tensor: bool) -> None:
        self.came_in_at_outputs = True
        is_rest = at_new_tensor and forward == self._last_awaited
        if self._entered not in self._awaited:
            self._entered = autograd.current_backward()
        if is_rest:
            self._entered_again = autograd.current_backward()
        if self._on_begin is not None:
            self._on_begin(is_rest)
        if self.is_awaited_here:
            self._last_awaited = forward

    def await_end(self) -> bool:
        """Arrange for `on_end` to be called after the backward that is running. False if that was done before."""
        backward = autograd.current_backward()
        if backward in self._awaited:
            return False
        self._awaited.add(backward)
        autograd.call_at_end_of_backward(partial(self._end, backward), self._on_failure)
        return True

    def _end(self, backward: int) -> None:
        try:
            if self._entered in self._awaited:
                is_nested = backward != self._entered
            else:
                is_nested = autograd.inside_another_backward() and not self._forward_was_nested
            self._on_end(is_nested)
        finally:
            self._awaited.discard(backward)

    @property
    def is_awaited(self) -> bool:
        """True while some backward is to call `on_end`; also after an exception, which keeps it from doing so."""
        return bool(self._awaited)

    @property
    def is_awaited_here(self) -> bool:
        """True within a backward that is to call `on_end`."""
        return autograd.current_backward() in self._awaited

    @property
    def is_rest_here(self) -> bool:
        """True within a backward that came in at another output of a forward whose first backward has ended."""
        return autograd.current_backward() == self._entered_again

    @property
    def is_over_here(self) -> bool:
        """True in the thread of the last forward if no backward runs there: the awaited one has ended, however."""
        return threading.get_ident() == self._thread and autograd.current_backward() < 0

    def wait_for_futures(self) -> None:
        futures, self.futures = self.futures, []
        for future in futures:
            future.wait()

    def reset(self) -> None:
        """Expect no end any more."""
        self._awaited.clear()
