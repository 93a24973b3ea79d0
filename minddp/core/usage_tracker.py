"""Which gradients a backward brings: each parameter's once, unless `FindUnused` or `StaticGraph` say otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minddp.core import autograd
from minddp.core.plan import BucketPlan
from minddp.core.usage_map import UsageMap
from minddp.transport.protocols import Transport

HookHandler = Callable[[int], object]


class UsageTracker:
    """The hook of each parameter fires once. The reducer calls the methods in this order.

    `skips_buckets`: buckets whose parameters are all unused are not reduced (skip_all_reduce_unused_params).
    """

    #: For error messages: the graph never changes; parameters may be unused.
    is_static = False
    finds_unused = False

    #: Hooks are only counted, by `record`, and everything is reduced when backward has ended.
    is_recording = False

    #: The next backward is recorded, so its order is not yet the order of readiness.
    order_is_provisional = False

    def __init__(
        self, params: Sequence[torch.nn.Parameter], *, usage: UsageMap | None = None, skips_buckets: bool = False
    ):
        self.params = params
        self.skips_buckets = skips_buckets
        self.usage = usage  # `None` if the ranks need not exchange which parameters they use
        self.last_unused: list[int] | None = None  # by this rank, in this backward or else the last one

    def wrap_hook(self, handler: HookHandler) -> HookHandler:
        """The function for a hook to call, in any backward: `handler`, preceded by a mark of use if needed."""
        return handler if self.usage is None else self.usage.marking(handler)

    def forward_begins(self) -> None:
        """The output of the last forward is no longer needed."""

    def post_forward(self, output: Any, *, is_first: bool) -> None:
        """A forward has returned `output`, and its backward will be synchronised."""
        if self.usage is not None:
            self.usage.grads_are_in_context = autograd.distributed_context() is not None

    def backward_begins(self) -> None:
        """A gradient has entered at the outputs; none has reached a parameter yet."""

    def backward_was_empty(self) -> None:
        """That backward has reached no parameter; another one may follow."""

    def begin_pass(self) -> list[int]:
        """The first gradient has arrived. Returns how often each hook will fire. Called within backward.

        Sets `last_unused`; for these parameters no hook is expected, and the count is 0.
        """
        if self.usage is not None:
            self.usage.begin_pass()
        self.last_unused = []
        return [1] * len(self.params)

    def hold(self, params: Sequence[int]) -> None:
        """Gradients of these are kept outside of `.grad` until the next reduction. See tools/elastic/."""
        if self.usage is not None:
            self.usage.held.update(params)

    def record(self, param: int) -> None:
        """A hook has fired in a backward that is recorded."""

    def recorded(self) -> None:
        """The recorded backward has ended. Sets `last_unused`."""

    def skipped_buckets(self, plan: BucketPlan) -> set[int]:
        """The buckets that are not reduced in the backward that begins."""
        return set()

    def stays_local(self, param: int) -> bool:
        """True if the average of `param` is never put into its gradient."""
        return False

    def all_launched(self, transport: Transport, *, leaves_outputs: bool, is_further: bool) -> None:
        """All buckets have been launched. Begin to exchange which parameters are used.

        `leaves_outputs`: no gradient has entered at some outputs of the forward. `is_further`: it is not the first
        backward of its forward.
        """
        if self.usage is not None:
            self.usage.begin_exchange(transport, leaves_outputs=leaves_outputs, is_further=is_further)

    def awaits_further_backward(self) -> bool:
        """True, on all ranks, if another backward of the forward that was reduced last is reduced, too."""
        return False

    def close(self) -> Sequence[bool] | None:
        """Backward has ended. Per parameter, True if no rank has used it; `None` if there is no such parameter."""
        return None

    def abandon(self) -> None:
        """An exception has ended the backward: discard its marks."""
        if self.usage is not None:
            self.usage.abandon()

    def shadow(self, transport: Transport) -> None:
        """Take part in the exchange of the other ranks, having used nothing. See modes/join.py."""
        if self.usage is not None:
            self.usage.shadow(transport)

    def reset(self) -> None:
        """The ranks have changed: discard all marks."""
        if self.usage is not None:
            self.usage.clear()
