"""`static_graph`: the first backward shows what all later ones bring.

Its hooks are only counted. When it has ended, every parameter's count is known, everything is reduced at once, and
the ranks exchange which parameters any of them has used. From then on each hook is expected as often as it was
counted; more often is an error, see [Note: once per backward].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minddp.core import autograd
from minddp.core.expectation import Expectation, HookHandler
from minddp.core.plan import BucketSpec
from minddp.core.usage_map import UsageMap
from minddp.transport.protocols import Transport


class StaticGraph(Expectation):
    """Records one backward and expects the same of all others; `finds_unused` is find_unused_parameters."""

    is_static = True

    def __init__(self, params: Sequence[torch.nn.Parameter], *, finds_unused: bool, skips_buckets: bool):
        super().__init__(params, skips_buckets=skips_buckets)
        self.finds_unused = finds_unused
        self.is_recording = True
        self._hook_counts = [0] * len(params)
        self.usage: UsageMap | None = UsageMap(params)  # until it is exchanged
        self._untouched: Sequence[bool] | None = None

    @property
    def order_is_provisional(self) -> bool:  # type: ignore[override]
        return self.usage is not None

    def armed(self, output: Any, *, is_first: bool) -> None:
        if self.usage is not None:
            self.usage.grads_are_in_context = autograd.distributed_context() is not None

    def wrap_hook(self, handler: HookHandler) -> HookHandler:
        return handler if self.usage is None else self.usage.marking(handler)

    def open(self) -> list[int]:
        if self.usage is not None:
            self.usage.begin_pass()
        return super().open() if self.is_recording else list(self._hook_counts)

    def record(self, param: int) -> None:
        self._hook_counts[param] += 1

    def recorded(self) -> None:
        self.is_recording = False
        self.last_unused = [param for param, count in enumerate(self._hook_counts) if not count]

    def skips(self, bucket: BucketSpec) -> bool:
        """As torch, which reduces all buckets of the recorded backward."""
        return self.usage is None and super().skips(bucket)

    def all_launched(self, transport: Transport) -> None:
        if self.usage is not None:
            self.usage.begin_exchange(transport)

    def close(self) -> Sequence[bool] | None:
        if self.usage is not None:
            self._untouched = self.usage.finish_exchange()
            self.usage = None
        return self._untouched

    def abandon(self) -> None:
        if self.usage is not None:
            self.usage.abandon()
        if self.is_recording:
            self._hook_counts = [0] * len(self.params)

    def shadow(self, transport: Transport) -> None:
        if self.usage is not None:
            self._untouched = self.usage.shadow(transport)
            self.usage = None

    def reset(self) -> None:
        if self.usage is not None:
            self.usage.clear()
        if self.is_recording:
            self._hook_counts = [0] * len(self.params)
