"""`find_unused_parameters`: any backward may leave parameters out, and different ones on different ranks.

[Note: unused parameters]
To find the parameters that a backward leaves out, torch walks the graph from the outputs in every forward. The
engine knows the answer: when backward begins it visits the whole graph to count dependencies. So minddp asks the
engine if it will run each accumulator, as soon as a gradient enters at the outputs. (The first hook would be too
late: it may fire in the nested backward of a reentrant checkpoint, which reaches only the checkpointed part.) That
takes no walk and no copy of the outputs, and is exact even if the loss uses only some of the outputs.

With `backward(inputs=...)` the engine leaves out the other parameters, too. So if some parameters are unused on all
ranks, or a rank has left outputs, a further backward of that forward is reduced as well.

In three cases the engine cannot tell, and the graph is walked: with the distributed engine; if another backward,
such as that of a penalty on a weight, brings gradients before the backward of the loss; and, in the first backward,
for parameters that the loss reaches although the outputs do not. Torch takes these for unused, and raises when
their gradient arrives after all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import Node

from minddp.core import autograd
from minddp.core.errors import skipped_but_used
from minddp.core.plan import BucketPlan
from minddp.core.usage_map import UsageMap
from minddp.core.usage_tracker import UsageTracker

_log = logging.getLogger(__name__)
NAME_IN_PROFILES = "torch.distributed.ddp.reducer::search_unused_parameters"  # torch's, for tools that look for it


class FindUnused(UsageTracker):
    """Asks the engine which parameters a backward leaves out; exchanges which ones any rank has used."""

    usage: UsageMap

    finds_unused = True

    def __init__(self, params: Sequence[torch.nn.Parameter], hooks: autograd.GradientHooks, *, skips_buckets: bool):
        super().__init__(params, usage=UsageMap(params), skips_buckets=skips_buckets)
        self._hooks = hooks
        self._outside_forward: set[int] = set()
        self._left_out: list[int] | None = None  # by the next backward, if known
        self._output_nodes: list[Node] = []  # of the forward whose backward is due
        self._skipped: dict[int, str] = {}  # the parameters in skipped buckets, with their names
        self._unused_so_far: set[int] = set()  # by any rank, in the backwards of the last reduced forward

    def forward_begins(self) -> None:
        self._output_nodes = []  # they keep the graph alive, and with it the activations

    def post_forward(self, output: Any, *, is_first: bool) -> None:
        self._outside_forward, self._left_out = set(), None
        self._output_nodes = [t.grad_fn for t in autograd.tensors_in(output) if t.grad_fn is not None]
        super().post_forward(output, is_first=is_first)
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

    def begin_pass(self) -> list[int]:
        if self._output_nodes and self._left_out is None:  # no gradient has entered at the outputs
            self._left_out = out_of_reach_of(self._output_nodes, self._hooks.accumulators)
        self.backward_begins()
        assert self._left_out is not None
        unused = sorted(self._outside_forward.union(self._left_out))
        self._outside_forward, self._left_out = set(), None
        if not unused:
            _say_that_all_are_used()
        hooks_left = super().begin_pass()
        self.last_unused = unused
        for param in unused:
            hooks_left[param] = 0
        return hooks_left

    def skipped_buckets(self, plan: BucketPlan) -> set[int]:
        """Those of which this rank uses no parameter; neither must the others, see `close`."""
        unused = set(self.last_unused or ()) if self.skips_buckets else set()
        skipped = [bucket for bucket in plan.buckets if all(slot.param in unused for slot in bucket.slots)]
        self._skipped = {slot.param: plan.params[slot.param].name for bucket in skipped for slot in bucket.slots}
        return {bucket.index for bucket in skipped}

    def close(self) -> Sequence[bool] | None:
        globally_unused = self.usage.finish_exchange()
        self.usage.clear()
        unused = {param for param, is_unused in enumerate(globally_unused or ()) if is_unused}
        self._unused_so_far = unused & self._unused_so_far if self.usage.is_further else unused
        used = [name for param, name in self._skipped.items() if not (globally_unused and globally_unused[param])]
        if used:
            raise skipped_but_used(used, self.usage.rank)
        return globally_unused

    def awaits_further_backward(self) -> bool:
        return bool(self._unused_so_far) or self.usage.any_rank_left_outputs()


@cache
def _say_that_all_are_used() -> None:
    """Once in a process. Not a Python warning, which may be turned into an error: torch prints it from C++."""
    _log.warning(
        "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in "
        "this backward. If every parameter is always used, leave it out and save the search."
    )


def out_of_reach_of(nodes: Sequence[Node], accumulators: Sequence[Node]) -> list[int]:
    """The indices of those `accumulators` that no path from `nodes` reaches. See [Note: unused parameters]."""
    seen: set[Node] = set()
    ahead = list(nodes)
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions if following is not None]
    return [index for index, node in enumerate(accumulators) if node not in seen]
