"""Faults that minddp has had, to be put back: a search for them is `--subject NAME`.

Each is found by a script in `test_found_faults.py`. How many scripts it takes until the search comes upon one, from
seed 0 on:
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.mid_training.side import SUBJECT
from tests.mutants.replaced import Break, apply

_CLEARED = "any(self._params[param].grad is None for param in reducer.current.ready_order)"

_LEFT = "if (left := self._left_by_exception(reducer)) and steps_on(optimizer, left):"

OLD_FAULTS = {
    fault.name: fault
    for fault in (
        Break(
            "step where an exception left an unused parameter",
            "core/unfinished.py",
            _LEFT,
            f"{_LEFT[:-1]} and not (reducer.expectation.finds_unused and {_CLEARED}):",
        ),
        Break(
            "step where an exception left an undefined gradient",
            "core/unfinished.py",
            _LEFT,
            f"{_LEFT[:-1]} and not (not reducer.expectation.finds_unused and {_CLEARED}):",
        ),
        Break(
            "static graph recorded by autograd.grad",
            "core/reducer.py",
            "                self.expectation.backward_was_empty()\n",
            "                if self.expectation.is_recording:\n"
            "                    self.expectation.recorded()\n"
            "                    self.current = None\n"
            "                    return self._bind_hooks()\n"
            "                self.expectation.backward_was_empty()\n",
        ),
        Break(
            "outputs without a node are watched",
            "core/autograd.py",
            "tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]",
            "tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]",
        ),
        Break(
            "views changed in place are not watched",
            "core/autograd.py",
            "enumerate([*tensors, *bases])",
            "enumerate(tensors)",
        ),
        Break(
            "second backward of a static graph stays local",
            "core/reducer.py",
            "if self.expectation.is_static and autograd.current_backward() == self._further_backward:",
            "if False:",
        ),
        Break(
            "recording ends with a checkpoint in a checkpoint",
            "core/backward_end.py",
            "        if self._entered in self._awaited:\n            is_nested",
            "        if False:\n            is_nested",
        ),
        Break(
            "callbacks of outputs read local gradients",
            "core/reducer.py",
            "before_other_hooks=self.expectation.is_recording",
            "before_other_hooks=False",
        ),
        Break(
            "hook watched by the old group's transport",
            "ddp.py",
            "self._reducer.change_ranks(self._transport, self._reduce_strategy())",
            "hooked = self._registered_hook is not None\n"
            "        strategy = self._reducer.reduce_strategy if hooked else self._reduce_strategy()\n"
            "        self._reducer.change_ranks(self._transport, strategy)",
        ),
    )
}


@contextlib.contextmanager
def put_back(subject: str) -> Iterator[str]:
    """If `subject` names an old fault, minddp has it again in this process. Gives the wrapper's name."""
    if subject not in OLD_FAULTS:
        yield subject
        return
    undo = apply(OLD_FAULTS[subject])
    try:
        yield SUBJECT
    finally:
        undo()
