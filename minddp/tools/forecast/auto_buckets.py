"""`bucket_cap_mb="auto"`: observe some steps, compute the plan that exposes the least, adopt it, and check it.

Ranks see different times, but must have one plan. So the median times of all ranks are gathered, the slowest rank
counts for each gradient, and every rank computes the plan from the same numbers. It is adopted if all have come to
the same one, and the old plan comes back if the new one is slower.

No observed step waits for a device: times are read and the link is measured between two steps.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from minddp.core.events import Event, EventKind
from minddp.core.plan import BucketPlan
from minddp.core.reducer import Reducer
from minddp.extension import Extension
from minddp.options import exclude
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
WORSE = 1.02  # a plan is given up when its backward takes this much longer


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


ENDS = tuple(map(Event, (EventKind.BACKWARD_BEGIN, EventKind.GRADIENTS_COMPLETE, EventKind.BACKWARD_END)))


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
    computed_s = max([clock.computed_s(begin, complete), *ready_s.values()])  # of any thread
    return Observed(ready_s, computed_s, clock.seconds(begin, complete), clock.seconds(begin, end))


class AutoBuckets:
    """Tunes the buckets of one reducer. Every rank calls `before_module` before each forward that trains."""

    def __init__(self, reducer: Reducer, clock: Clock):
        self._reducer = reducer
        self._clock = clock
        self._observer: Observer | None = None
        self._is_done = False
        self.tuning: Tuning | None = None

    def before_module(self) -> None:
        """Observe, switch or check when it is time; all ranks at the same step, as they count the same backwards.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        if self._is_done:
            return
        if self._clock.is_stopped:
            num_steps = 2 * (WARM_UP_STEPS + OBSERVED_STEPS) + 4
            raise RuntimeError(
                f'bucket_cap_mb="auto" observes steps, but one that a CUDA graph captures has no times, and its '
                f"buckets cannot be changed later. Take {num_steps} steps before the capture."
            )
        if self._observer is None:
            if self._reducer.store.has_rebuilt:
                self._observe()
        elif len(self._observer.backwards) >= WARM_UP_STEPS + OBSERVED_STEPS:
            self._reducer.events.unwatch(self._observer)
            if self.tuning is None:
                self._switch()
            else:
                self._check(self.tuning)

    def _observe(self) -> None:
        self._observer = Observer(self._clock)
        self._reducer.events.watch(self._observer)

    def _switch(self) -> None:
        reducer, seen = self._reducer, self._agreed()
        device = reducer.params[0].device
        link = calibrated(measure_link(reducer.transport, device, self._clock), reducer.plan, seen)
        proposed = plan_buckets(reducer.plan.params, list(seen.ready_s.values()), link, seen.computed_s)
        plan = min(reducer.plan, proposed, key=lambda plan: predicted_s(plan, link, seen))  # the old one if equal
        groups = [[slot.param for slot in bucket.slots] for bucket in plan.buckets]
        if not are_equal_everywhere(reducer.transport, groups, device):  # by a processor that rounds otherwise
            plan = reducer.plan
        self.tuning = Tuning(link, reducer.plan, plan, seen.end_s, predicted_s(plan, link, seen), seen)
        if plan is reducer.plan:
            self._is_done = True
            _log.info("No other buckets are predicted to be faster. %s", self.tuning)
            return
        reducer.adopt(plan)
        self._observe()

    def _check(self, tuning: Tuning) -> None:
        self.tuning = replace(tuning, measured_s=self._agreed().end_s)
        if not self.tuning.is_kept:
            self._reducer.adopt(tuning.before)
        self._is_done = True
        _log.info("Buckets tuned. %s", self.tuning)

    def _agreed(self) -> Observed:
        """Medians over the observed backwards, of the slowest rank. Collective."""
        params = self._reducer.params
        rows = []
        assert self._observer is not None, "agreed after observing"
        for stamps in self._observer.backwards[WARM_UP_STEPS:]:
            seen = observed(stamps, self._clock)
            ready_s = [seen.ready_s.get(param, 0.0) for param in range(len(params))]
            rows.append([*ready_s, seen.computed_s, seen.gradients_complete_s, seen.end_s])
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        own = torch.tensor(medians, dtype=torch.float64, device=params[0].device)
        gathered = torch.stack(list(self._reducer.transport.all_gather(own)))
        *ready_s, computed_s, complete_s, end_s = gathered.amax(0).tolist()
        return Observed(dict(enumerate(ready_s)), computed_s, complete_s, end_s)


@dataclass(eq=False)
class TunedBuckets(Extension):
    """Observes some steps, and chooses the buckets by them."""

    tuner: AutoBuckets | None = field(default=None, init=False)

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
        self.tuner = AutoBuckets(ddp._reducer, clock_of(param.device for param in ddp._reducer.params))

    def before_module(self, ddp: DistributedDataParallel, inputs: Any, kwargs: Any) -> None:
        assert self.tuner is not None
        self.tuner.before_module()
