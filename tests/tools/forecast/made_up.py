"""A device that runs its work when the host waits for it, and takes made-up times; and a backward by the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from minddp.core.plan import BucketPlan
from minddp.tools.forecast.link import Link
from minddp.tools.forecast.step_model import Observed, Times

STEP_MS = 3.0  # what passes on the device between two stamps


@dataclass
class FakeDevice:
    """Events are passed in the order in which they were recorded, each `STEP_MS` after the one before.

    `waits` counts how often the host has waited for it.
    """

    queue: list[FakeEvent] = field(default_factory=list)
    now_ms: float = 0.0
    waits: int = 0
    recorded: int = 0
    is_capturing: bool = False

    def run_until(self, event: FakeEvent) -> None:
        self.waits += 1
        while event.passed_ms is None:
            self.now_ms += STEP_MS
            self.queue.pop(0).passed_ms = self.now_ms

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
        """It is in the place of torch.cuda, as far as clocks use that."""
        device = cls()
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(device, enable_timing))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: device)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.is_capturing)
        return device


@dataclass(eq=False)
class FakeEvent:
    """Has the time at which it was passed, and returns it only if it was."""

    device: FakeDevice
    enable_timing: bool
    passed_ms: float | None = None

    def record(self, stream: Any) -> None:
        assert stream is self.device, "on the current stream"
        self.device.recorded += 1
        self.device.queue.append(self)

    def synchronize(self) -> None:
        self.device.run_until(self)

    def elapsed_time(self, last: FakeEvent) -> float:
        assert self.enable_timing
        assert self.passed_ms is not None, "not ready"
        assert last.passed_ms is not None, "not ready"
        return last.passed_ms - self.passed_ms


def simulated(plan: BucketPlan, ready_s: Times, link: Link, computed_s: float) -> Observed:
    """A measurement, second by second, in which the model of `step_model.py` is exact."""
    now = computed = 0.0
    complete_s = None
    for bucket in plan.buckets:
        until_ready = max(0.0, max(ready_s[slot.param] for slot in bucket.slots) - computed)
        now, computed = now + until_ready, computed + until_ready
        before, since, message_s = computed, now, link.seconds(bucket.nbytes)
        now, computed = now + message_s, computed + (1 - link.taken) * message_s
        if complete_s is None and computed >= computed_s:
            complete_s = since + (computed_s - before) / (1 - link.taken) if computed > before else since
    rest_s = max(0.0, computed_s - computed)
    return Observed(ready_s, computed_s, now + rest_s if complete_s is None else complete_s, now + rest_s)
