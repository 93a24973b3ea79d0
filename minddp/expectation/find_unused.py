"""Which parameters the next backward will leave out, for `find_unused_parameters`. See [Note: unused parameters].

As a rule the engine is asked, as soon as a gradient enters at the outputs: the first hook may fire in a nested
backward, that of a reentrant checkpoint, which reaches only what has been checkpointed. Where the engine does not
know, the graph is walked when forward returns.
"""

from __future__ import annotations

from typing import Any

import torch

from minddp.core import autograd

NAME_IN_PROFILES = "torch.distributed.ddp.reducer::search_unused_parameters"  # torch's, for tools that look for it


class Reach:
    """What is known before the first gradient has come. Parameters are told by the index of their hook."""

    def __init__(self, hooks: autograd.Hooks):
        self._hooks = hooks
        self._outside_forward: set[int] = set()
        self._left_out: list[int] | None = None

    def forget(self) -> None:
        """Another forward has begun."""
        self._outside_forward = set()
        self.forget_backward()

    def forget_backward(self) -> None:
        """The backward has reached no parameter; there may be another."""
        self._left_out = None

    def walk_from(self, output: Any) -> None:
        """For a backward that the distributed engine will run."""
        self._left_out = autograd.out_of_reach_of(output, self._hooks.accumulators)

    def note_outside_forward(self, output: Any) -> None:
        """As in torch, what no path leads to from `output` counts as left out, even if the loss reaches it."""
        self._outside_forward = set(autograd.out_of_reach_of(output, self._hooks.accumulators))

    def ask_engine(self) -> None:
        """In the backward that is running. Does nothing if the answer is known."""
        if self._left_out is None:
            with torch.autograd.profiler.record_function(NAME_IN_PROFILES):
                accumulators = enumerate(self._hooks.accumulators)
                self._left_out = [param for param, node in accumulators if not autograd.will_be_reached(node)]

    def left_out(self) -> list[int]:
        """The answer for the backward that is running, in order; then it is forgotten."""
        self.ask_engine()
        assert self._left_out is not None
        answer = sorted(self._outside_forward.union(self._left_out))
        self.forget()
        return answer
