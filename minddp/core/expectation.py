"""Which gradients a backward will bring: as a rule each parameter's, once. Exceptions are in `expectation/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minddp.core.plan import BucketSpec
from minddp.transport.protocols import Transport

HookHandler = Callable[[int], object]


class Expectation:
    """Each parameter's hook fires once. A subclass expects otherwise; the reducer calls methods in this order.

    `last_unused` are the parameters that this rank leaves out of this backward, or left out of the last one; `None`
    before the first one. `skips_buckets`: buckets of such parameters only are not reduced
    (skip_all_reduce_unused_params).
    """

    #: What errors say of it: the graph never changes; parameters may be unused.
    is_static = False
    finds_unused = False

    #: A backward may leave out some outputs. Another one, through those, is then reduced, too.
    ends_with_each_backward = False

    #: Hooks are only counted (`record`), and everything is reduced when backward has ended.
    is_recording = False

    #: The next backward only shows what later ones will bring, so its order is not yet the order of readiness.
    order_is_provisional = False

    def __init__(self, params: Sequence[torch.nn.Parameter], *, skips_buckets: bool = False):
        self.params = params
        self.skips_buckets = skips_buckets
        self.last_unused: list[int] | None = None

    def wrap_hook(self, handler: HookHandler) -> HookHandler:
        """What a hook calls, in any backward, to do `handler` and note what the expectation needs."""
        return handler

    def forward_begins(self) -> None:
        """The output of the last forward is not needed any more."""

    def armed(self, output: Any, *, is_first: bool) -> None:
        """A forward has returned `output`, and its backward will be reduced."""

    def backward_begins(self) -> None:
        """A gradient has entered at the outputs; none has reached a parameter yet."""

    def backward_was_empty(self) -> None:
        """That backward has reached no parameter; there may be another."""

    def open(self) -> list[int]:
        """The first gradient has arrived: how often will each hook fire in this backward? Called within it.

        Sets `last_unused`: for these no hook is expected, and the count is 0.
        """
        self.last_unused = []
        return [1] * len(self.params)

    def hold(self, params: Sequence[int]) -> None:
        """These have gradients that are held outside of `.grad` until the next reduction. See elastic/."""

    def record(self, param: int) -> None:
        """A hook has fired in a backward that is recorded."""

    def recorded(self) -> None:
        """The recorded backward has ended. Sets `last_unused`."""

    def skips(self, bucket: BucketSpec) -> bool:
        """True if the bucket is not reduced: this rank uses none of its parameters; by the option, no rank does."""
        return self.skips_buckets and all(slot.param in (self.last_unused or ()) for slot in bucket.slots)

    def all_launched(self, transport: Transport) -> None:
        """All buckets are under way; begin to exchange what must be known of the other ranks."""

    def close(self) -> Sequence[bool] | None:
        """Backward has ended. Per parameter, True if no rank has used it; `None` if there is no such parameter."""
        return None

    def abandon(self) -> None:
        """An exception has ended the backward: nothing that it has shown counts."""

    def shadow(self, transport: Transport) -> None:
        """Take part in what the other ranks exchange, having used nothing. See modes/join.py."""

    def reset(self) -> None:
        """The ranks have changed: drop what was noted for the next reduction."""
