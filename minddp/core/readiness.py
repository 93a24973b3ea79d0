"""Counts hooks. This runs once per parameter and backward, so it does little.

[Note: the hook is bound]
A hook costs what it executes times the number of parameters, and it runs between two kernels that have just
evicted its data from the cache. So a hook does not ask in which state the reducer is. It calls
`GradientHooks.handler`, which the reducer binds anew when its phase changes: from the first gradient of a backward
to the last, it is `Readiness.mark_ready` itself.

[Note: once per backward]
A gradient that is accumulated again after it was counted would be missing from the average, or be added to it
unreduced. So every parameter keeps its hook in every step, and one that fires more often than expected is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minddp.core.bucket_store import BucketStore
from minddp.core.events import Event, EventKind, EventStream


class Readiness:
    """For one backward: how often each hook has still to fire, and how many parameters each pack group waits for.

    `hooks_left[i]` is 1 as a rule, 0 for a parameter that this backward leaves out, and more where a static graph
    gives one parameter several gradients. `ready_order` are the parameters that are ready, in that order.
    """

    def __init__(
        self,
        hooks_left: Sequence[int],
        store: BucketStore,
        events: EventStream,
        on_group_ready: Callable[[int], object],
        on_ready_twice: Callable[[int], object],
    ):
        self.hooks_left = list(hooks_left)
        self.ready_order: list[int] = []
        self._group_of = store.group_of
        self._params_left = [len(params) for params in store.members]
        self._events = events
        self._on_group_ready = on_group_ready
        self._on_ready_twice = on_ready_twice

    def mark_ready(self, param: int) -> None:
        """A hook has fired. See [Note: the hook is bound]."""
        left = self.hooks_left[param] - 1
        self.hooks_left[param] = left
        if left:
            if left < 0:
                self._on_ready_twice(param)
            return
        self.ready_order.append(param)
        if self._events.sink is not None:
            self._events.sink(Event(EventKind.PARAM_READY, param))
        group = self._group_of[param]
        self._params_left[group] -= 1
        if not self._params_left[group]:
            self._on_group_ready(group)

    def mark_unused(self, param: int) -> None:
        """No hook will fire for `param`: it counts as ready."""
        self.hooks_left[param] = 1
        self.mark_ready(param)

    def missing(self) -> list[int]:
        """The parameters that are still awaited, in order."""
        return [param for param, left in enumerate(self.hooks_left) if left > 0]
