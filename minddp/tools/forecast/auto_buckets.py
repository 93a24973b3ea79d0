"""`bucket_cap_mb="auto"`: observe some steps, compute the plan that exposes the least, adopt it, and check it.

Ranks see different times, but must have one plan. So the median times of all ranks are gathered, the slowest rank
counts for each gradient, and every rank computes the plan from the same numbers. It is adopted if all have come to
the same one, and the old plan comes back if the new one is slower.

No observed step waits for a device: times are read and the link is measured between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from minddp.core.events import Event, EventKind
from minddp.core.plan import BucketPlan
from minddp.core.reducer import Reducer
from minddp.extension import Extension
from minddp.options import exclude
from minddp.platform import streams
from minddp.replicas.agreement import are_equal_everywhere
from minddp.tools.forecast.gradient_clock import Clock, clock_of
from minddp.tools.forecast.link import Link, measure_link
from minddp.tools.forecast.planner import plan_buckets
from minddp.tools.forecast.step_model import Observed, calibrated, predicted_s

if TYPE_CHECKING:
    from minddp.ddp import DistributedDataParallel

_log = logging.getLogger(__name__)
AUTO = "auto"
WARM_UP_STEPS = 3
OBSERVED_STEPS = 8
STEPS = 2 * (WARM_UP_STEPS + OBSERVED_STEPS) + 4  # enough for all of it
WORSE = 1.02  # a plan is given up when its backward takes this much longer
ENDS = tuple(map(Event, (EventKind.BACKWARD_BEGIN, EventKind.GRADIENTS_COMPLETE, EventKind.BACKWARD_END)))

Returned = TypeVar("Returned")
Steps = Generator["Tuning | None", None, Returned]  # before each forward; yields the outcome so far


@dataclass(frozen=True)
class Tuning:
    """The outcome, in seconds of one backward, medians; `measured_s` is `None` until the new plan was observed."""

    link: Link
    before: BucketPlan
    plan: BucketPlan
    before_s: float
    predicted_s: float
    seen: Observed
    measured_s: float | None = None

    @property
    def is_kept(self) -> bool:
        return self.measured_s is None or self.measured_s <= WORSE * self.before_s

    def __str__(self) -> str:
        measured = "not measured" if self.measured_s is None else f"measured {1e3 * self.measured_s:.2f} ms"
        return (
            f"buckets: {len(self.before.buckets)} -> {len(self.plan.buckets)}; backward: "
            f"{1e3 * self.before_s:.2f} ms -> predicted {1e3 * self.predicted_s:.2f} ms, {measured}; link: "
            f"{1e6 * self.link.latency_s:.0f} us + {self.link.bytes_per_s / 1e6:.0f} MB/s, "
            f"{self.link.taken:.0%} of it taken from backward" + ("" if self.is_kept else "; undone")
        )


class Observer:
    """An event sink that stamps whole backwards; `backwards` are the stamps of each, by event."""

    def __init__(self, clock: Clock) -> None:
        self.backwards: list[dict[Event, Any]] = []
        self._clock = clock
        self._current: dict[Event, Any] = {}

    def __call__(self, event: Event) -> None:
        if event.kind is EventKind.BACKWARD_BEGIN:
            self._current = {}
        if event.kind is EventKind.PARAM_READY or event in ENDS:
            self._current[event] = self._clock.stamp()
        if event.kind is EventKind.BACKWARD_END:
            self.backwards.append(self._current)


def observed(stamps: Mapping[Event, Any], clock: Clock) -> Observed:
    """The times between the stamps of one backward. Waits for its end."""
    begin, complete, end = (stamps[event] for event in ENDS)
    ready = {event.subject: stamp for event, stamp in stamps.items() if event.kind is EventKind.PARAM_READY}
    ready_s = {param: clock.computed_s(begin, stamp) for param, stamp in ready.items()}
    computed_s = clock.computed_s(begin, complete)
    return Observed(ready_s, computed_s, clock.seconds(begin, complete), clock.seconds(begin, end))


def tune(reducer: Reducer, clock: Clock) -> Steps[Tuning]:
    """Tune the buckets; every rank advances this before each forward that trains. Collective."""
    while not reducer.store.has_rebuilt:
        yield None
    seen = yield from _observe(reducer, clock, None)
    tuning = _computed(reducer, clock, seen)
    if tuning.plan is not tuning.before:
        reducer.adopt(tuning.plan)
        seen = yield from _observe(reducer, clock, tuning)
        tuning = replace(tuning, measured_s=seen.end_s)
        if not tuning.is_kept:
            reducer.adopt(tuning.before)
    _log.info("Buckets tuned. %s", tuning)
    return tuning


def _observe(reducer: Reducer, clock: Clock, so_far: Tuning | None) -> Steps[Observed]:
    """Medians over some backwards, of the slowest rank. All ranks return in one step, as they count the same."""
    observer = Observer(clock)
    reducer.events.watch(observer)
    while len(observer.backwards) < WARM_UP_STEPS + OBSERVED_STEPS:
        yield so_far
    reducer.events.unwatch(observer)
    rows = []
    for stamps in observer.backwards[WARM_UP_STEPS:]:
        seen = observed(stamps, clock)
        ready_s = [seen.ready_s.get(param, 0.0) for param in range(len(reducer.params))]
        rows.append([*ready_s, seen.computed_s, seen.gradients_complete_s, seen.end_s])
    own = torch.tensor(np.median(rows, axis=0), device=reducer.params[0].device)
    *ready, computed_s, complete_s, end_s = torch.stack(list(reducer.transport.all_gather(own))).amax(0).tolist()
    return Observed(dict(enumerate(ready)), computed_s, complete_s, end_s)


def _computed(reducer: Reducer, clock: Clock, seen: Observed) -> Tuning:
    """The best plan by the model: the present one if no other is better, or if the ranks do not agree."""
    device, before = reducer.params[0].device, reducer.store.plan
    link = calibrated(measure_link(reducer.transport, device, clock), before, seen)
    backward_s = partial(predicted_s, link=link, ready_s=seen.ready_s, computed_s=seen.computed_s)
    proposed = plan_buckets(before.params, seen.ready_s, link, seen.computed_s)
    plan = min(before, proposed, key=backward_s)  # the old one if equal
    groups = [[slot.param for slot in bucket.slots] for bucket in plan.buckets]
    if not are_equal_everywhere(reducer.transport, groups, device):  # by a processor that rounds otherwise
        plan = before
    return Tuning(link, before, plan, seen.end_s, backward_s(plan), seen)


@dataclass(eq=False)
class AutoBuckets(Extension):
    """Tunes the buckets of a wrapper; `tuning` is the outcome, once there is one."""

    tuning: Tuning | None = field(default=None, init=False)
    _steps: Steps[Tuning] | None = field(default=None, init=False)  # `None` when done

    def agreed(self) -> Mapping[str, object]:
        return {"bucket_cap_mb": AUTO}

    def check(self, arguments: Mapping[str, Any]) -> None:
        order_may_change = arguments["find_unused_parameters"] and not arguments["static_graph"]
        others = {
            "`bucket_cap_mb_list`": arguments["bucket_cap_mb_list"] is not None,
            "`first_bucket_cap_mb`": arguments["first_bucket_cap_mb"] is not None,
            "`find_unused_parameters`": bool(order_may_change),
        }
        exclude('`bucket_cap_mb="auto"`', others)
        clock_of(param.device for param in arguments["module"].parameters())  # raises where nothing can be timed

    def attach(self, ddp: DistributedDataParallel, *, starts_equal: bool) -> None:
        self._steps = tune(ddp._reducer, clock_of(param.device for param in ddp._reducer.params))

    def before_module(self, ddp: DistributedDataParallel, inputs: Any, kwargs: Any) -> None:
        if self._steps is None:
            return
        if streams.is_capturing(ddp._reducer.params[0].device):
            raise RuntimeError(
                f'bucket_cap_mb="auto" observes steps, but one that a CUDA graph captures has no times, and its '
                f"buckets cannot be changed later. Take {STEPS} steps before the capture."
            )
        try:
            self.tuning = next(self._steps)
        except StopIteration as done:
            self.tuning, self._steps = done.value, None
