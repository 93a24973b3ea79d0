"""Which gradients a backward will bring: as a rule each parameter's, once. Exceptions are in `expectation/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from minddp.core.plan import BucketSpec
from minddp.transport.protocols import Transport

HookHandler = Callable[[int], object]


class Expected(NamedTuple):
    """`hooks_left[i]`: how often parameter i's hook will fire. `unused`: the parameters that get no gradient."""

    hooks_left: list[int]
    unused: list[int]


class Expectation:
    """Each parameter's hook fires once. A subclass expects otherwise; the reducer calls methods in this order.

    `last_unused` are the parameters that this rank left out of the last backward; `None` before the first one.
    """

    #: What errors say of it: the graph never changes; parameters may be unused.
    is_static = False
    finds_unused = False

    #: A backward may leave out some outputs. Another one, through those, is then reduced, too.
    ends_with_each_backward = False

    #: Hooks are only counted (`record`), and everything is reduced when backward has ended.
    is_recording = False

    #: The next backward only shows what later ones will bring, so its order is not yet the order of readiness.
    is_settling = False

    def __init__(self, params: Sequence[torch.nn.Parameter]):
        self.params = params
        self.last_unused: list[int] | None = None

    def observing(self, handler: HookHandler) -> HookHandler:
        """What a hook calls, in any backward, to do `handler` and note what the expectation needs."""
        return handler

    def forward_begins(self) -> None:
        """The output of the last forward is not needed any more."""

    def armed(self, output: Any, *, is_first: bool) -> None:
        """A forward has returned `output`, and its backward will be reduced."""

    def backward_begins(self) -> None:
        """A gradient has entered at the outputs; none has reached a parameter yet."""

    def forget_backward(self) -> None:
        """That backward has reached no parameter; there may be another."""

    def open(self) -> Expected:
        """The first gradient has arrived: what will this backward bring? Called within the backward."""
        self.last_unused = []
        return Expected([1] * len(self.params), [])

    def record(self, param: int) -> None:
        """A hook has fired in a backward that is recorded."""

    def recorded(self) -> list[int]:
        """The recorded backward has ended: the parameters that it left out."""
        return []

    def skips(self, bucket: BucketSpec) -> bool:
        """True if no rank needs to reduce this bucket."""
        return False

    def all_launched(self, transport: Transport) -> None:
        """All buckets are under way; begin to exchange what must be known of the other ranks."""

    def close(self) -> Sequence[bool] | None:
        """Backward has ended. Per parameter, True if no rank has used it; `None` if there is no such parameter."""
        return None

    def revert(self) -> None:
        """An exception has ended the backward: forget it."""

    def shadow(self, transport: Transport) -> None:
        """Take part in what the other ranks exchange, having used nothing. See modes/join.py."""

    def forget(self) -> None:
        """The ranks have changed: forget what was noted for the next reduction."""
