"""`static_graph`: the first backward is recorded, and all later ones are the same.

In the first backward hooks are only counted. At its end everything is reduced at once, and the ranks exchange which
parameters they have used. From then on each hook must fire exactly as often as it was counted; a hook that fires
more often raises an error, see [Note: once per backward].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minddp.core.plan import BucketPlan
from minddp.core.usage_map import UsageMap
from minddp.core.usage_tracker import UsageTracker
from minddp.transport.protocols import Transport


class StaticGraph(UsageTracker):
    """Records the first backward and requires all later ones to match."""

    is_static = True

    def __init__(self, params: Sequence[torch.nn.Parameter], *, skips_buckets: bool):
        super().__init__(params, usage=UsageMap(params), skips_buckets=skips_buckets)  # until that is exchanged
        self.is_recording = True
        self._hook_counts: list[int] = []
        self._globally_unused: Sequence[bool] | None = None

    @property
    def order_is_provisional(self) -> bool:  # type: ignore[override]
        return self.usage is not None

    def begin_pass(self) -> list[int]:
        if self.is_recording:
            self._hook_counts = [0] * len(self.params)
            return super().begin_pass()
        if self.usage is not None:
            self.usage.begin_pass()
        return list(self._hook_counts)

    def record(self, param: int) -> None:
        self._hook_counts[param] += 1

    def recorded(self) -> None:
        self.is_recording = False
        self.last_unused = [param for param, count in enumerate(self._hook_counts) if not count]

    def skipped_buckets(self, plan: BucketPlan) -> set[int]:
        """Those that no rank uses. As torch, which reduces all buckets of the recorded backward."""
        if not self.skips_buckets or (unused := self._globally_unused) is None:
            return set()
        return {bucket.index for bucket in plan.buckets if all(unused[slot.param] for slot in bucket.slots)}

    def stays_local(self, param: int) -> bool:
        return self._globally_unused is not None and self._globally_unused[param]

    def close(self) -> Sequence[bool] | None:
        if self.usage is not None:
            self._globally_unused = self.usage.finish_exchange()
            self.usage = None
        return self._globally_unused

    def shadow(self, transport: Transport) -> None:
        if self.usage is not None:
            self._globally_unused = self.usage.shadow(transport)
            self.usage = None
