"""`find_unused_parameters`: every backward may leave parameters out, and other ones on other ranks.

[Note: unused parameters]
To know which parameters a backward leaves out, torch walks the graph from the outputs in every forward. The
engine has computed the answer anyway: when backward begins it visits the whole graph to count dependencies.
So minddp asks the engine if it will run each accumulator, as soon as a gradient enters at the outputs: the first
hook may fire in a nested backward, that of a reentrant checkpoint, which reaches only what has been checkpointed.
That takes no walk, needs no copy of the outputs, and is exact for the loss at hand, also when the loss uses only
some of the outputs. Three things the engine does not say, so then the graph is walked: what the distributed engine
will reach; what the backward of the loss will reach, if another backward (a penalty on a weight) brings gradients
first; and, once in the first backward, what the loss reaches although the outputs do not. Torch takes such
parameters for unused and raises when their gradient arrives after all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import Node

from minddp.core import autograd
from minddp.core.expectation import Expectation, HookHandler
from minddp.core.usage_map import UsageMap
from minddp.transport.protocols import Transport

_log = logging.getLogger(__name__)
NAME_IN_PROFILES = "torch.distributed.ddp.reducer::search_unused_parameters"  # torch's, for tools that look for it


class FindUnused(Expectation):
    """Asks the engine which parameters a backward leaves out; exchanges which ones any rank has used."""

    finds_unused = True
    ends_with_each_backward = True

    def __init__(self, params: Sequence[torch.nn.Parameter], hooks: autograd.GradientHooks, *, skips_buckets: bool):
        super().__init__(params, skips_buckets=skips_buckets)
        self._hooks = hooks
        self.usage = UsageMap(params)
        self._outside_forward: set[int] = set()
        self._left_out: list[int] | None = None  # by the coming backward, if that is known
        self._output_nodes: list[Node] = []  # of the forward whose backward is due

    def wrap_hook(self, handler: HookHandler) -> HookHandler:
        return self.usage.marking(handler)

    def forward_begins(self) -> None:
        self._output_nodes = []  # they keep the graph, and with it the activations

    def armed(self, output: Any, *, is_first: bool) -> None:
        self._outside_forward, self._left_out = set(), None
        self._output_nodes = [t.grad_fn for t in autograd.tensors_in(output) if t.grad_fn is not None]
        self.usage.grads_are_in_context = autograd.distributed_context() is not None
        if self.usage.grads_are_in_context:
            self._left_out = out_of_reach_of(self._output_nodes, self._hooks.accumulators)
        elif is_first:
            self._outside_forward = set(out_of_reach_of(self._output_nodes, self._hooks.accumulators))

    def backward_begins(self) -> None:
        self._output_nodes = []
        if self._left_out is None:
            with autograd.recorded(NAME_IN_PROFILES):
                nodes = enumerate(self._hooks.accumulators)
                self._left_out = [param for param, node in nodes if not autograd.will_be_reached(node)]

    def backward_was_empty(self) -> None:
        self._left_out = None

    def open(self) -> list[int]:
        if self._output_nodes and self._left_out is None:  # no gradient has entered at the outputs yet
            self._left_out = out_of_reach_of(self._output_nodes, self._hooks.accumulators)
        self.backward_begins()
        assert self._left_out is not None
        unused = sorted(self._outside_forward.union(self._left_out))
        self._outside_forward, self._left_out, self.last_unused = set(), None, unused
        self.usage.begin_pass()
        if not unused:
            _say_that_all_are_used()
        left_out = set(unused)
        return [int(param not in left_out) for param in range(len(self.params))]

    def hold(self, params: Sequence[int]) -> None:
        self.usage.held.update(params)

    def all_launched(self, transport: Transport) -> None:
        self.usage.begin_exchange(transport)

    def close(self) -> Sequence[bool] | None:
        untouched = self.usage.finish_exchange()
        self.usage.clear()
        return untouched

    def abandon(self) -> None:
        self.usage.abandon()

    def shadow(self, transport: Transport) -> None:
        self.usage.shadow(transport)

    def reset(self) -> None:
        self.usage.clear()


@cache
def _say_that_all_are_used() -> None:
    """Once in a process and not as a Python warning, which may be an error: torch prints it from C++."""
    _log.warning(
        "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in "
        "this backward. If every parameter is always used, leave it out and save the search."
    )


def out_of_reach_of(nodes: Sequence[Node], accumulators: Sequence[Node]) -> list[int]:
    """Those of `accumulators`, as indices, that no path leads to from `nodes`. See [Note: unused parameters]."""
    seen: set[Node] = set()
    ahead = list(nodes)
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions if following is not None]
    return [index for index, node in enumerate(accumulators) if node not in seen]
