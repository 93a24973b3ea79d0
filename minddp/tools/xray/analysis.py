"""The analysis of one recording: its steps, the costs of messages, and the advice. All pictures use it.

Each change is tried on the model of `model.py`. Its gain is the difference to a prediction of the step as it is, so
an error that both predictions have cancels out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan
from minddp.tools.forecast.link import FREE
from minddp.tools.forecast.planner import plan_buckets
from minddp.tools.xray.model import Costs, backward_end_ns, costs_of, predicted_ns
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.timeline import RecordedStep

LEAST_SHARE = 0.01  # of a step: gains below are not mentioned
FASTER = 10  # the link


@dataclass(frozen=True)
class WhatIf:
    """A change: in words, as code if there is any, and by how much it gains."""

    title: str
    code: str
    gain_ns: float


class NoStep(ValueError):
    """The recording holds no step."""


@dataclass(frozen=True)
class Analysis:
    """Each property is computed once, when it is first read.

    Raises:
        NoStep: any property, if no whole step was recorded.
    """

    recording: Recording

    @cached_property
    def steps(self) -> tuple[RecordedStep, ...]:
        if steps := steps_of(self.recording):
            return steps
        raise NoStep(
            "No whole step was recorded: there must be a forward and a synchronised backward within the recording. "
            "Put `with minddp.xray(ddp)` around at least one whole step."
        )

    @cached_property
    def typical(self) -> RecordedStep:
        """The step of median length. It stands for all."""
        median = statistics.median_low(step.length_ns for step in self.steps)
        return next(step for step in self.steps if step.length_ns == median)

    @cached_property
    def noise_ns(self) -> int:
        """The middle half of the steps' lengths lies within this; 0 for one step."""
        lengths_ns = [step.length_ns for step in self.steps]
        low, _, high = statistics.quantiles(lengths_ns * 2, method="inclusive")
        return round(high - low)

    @cached_property
    def costs(self) -> Costs | None:
        """The costs of messages; None if none was seen to complete, so that nothing can be predicted."""
        return costs_of(self.steps, self.typical)

    @cached_property
    def predicted_ns(self) -> float | None:
        """The length that the model predicts for the typical step as it is; None without `costs`."""
        return None if self.costs is None else predicted_ns(self.typical, self.costs)

    @cached_property
    def what_ifs(self) -> list[WhatIf]:
        """All changes that were tried, the best first; none without `costs`."""
        if self.costs is None:
            return []
        tried = what_ifs(self.recording, self.typical, self.costs)
        return sorted(tried, key=lambda change: change.gain_ns, reverse=True)

    @cached_property
    def advice(self) -> list[WhatIf]:
        """The gains that are not negligible, the largest first."""
        return [one for one in self.what_ifs if one.gain_ns >= LEAST_SHARE * self.typical.length_ns]


def what_ifs(recording: Recording, step: RecordedStep, costs: Costs) -> Iterator[WhatIf]:
    """The late rank as quick as the others; other messages; other buckets, if the wrapper's arguments allow."""
    as_it_is_ns = backward_end_ns(step, costs)

    def change(title: str, code: str = "", then: Costs = costs, plan: BucketPlan | None = None) -> WhatIf:
        return WhatIf(title, code, as_it_is_ns - backward_end_ns(step, then, plan))

    def times_as_fast(factor: float) -> Costs:
        return replace(costs, wire=replace(costs.wire, bytes_per_s=factor * costs.wire.bytes_per_s))

    if len(step.ranks) > 1:
        others = replace(step, ranks=tuple(rank for rank in step.ranks if rank is not step.last))
        gain_ns = as_it_is_ns - backward_end_ns(others, costs)
        yield WhatIf(f"rank {step.last.rank} as quick as the others", "", gain_ns)
    yield change(f"a wire {FASTER} times as fast", then=times_as_fast(FASTER))
    if not recording.has_plan:
        return
    has_hook = any(e.kind is EventKind.COMM_HOOK_RETURNED for rank in recording.ranks for e in rank.events)
    params = step.plan.params
    if not has_hook and {p.dtype for p in params} == {torch.float32}:
        code = "ddp.register_comm_hook(None, fp16_compress_hook)"
        yield change("half the bytes, by a hook of lower precision", code, times_as_fast(2))
    if costs.copy is not FREE:
        code = "DistributedDataParallel(model, gradient_as_bucket_view=True)"
        yield change("no copy back", code, replace(costs, copy=FREE))
    ready_s = [
        max(rank.ready_ns.get(param, rank.gradients_complete_ns) - step.begin_ns for rank in step.ranks) / 1e9
        for param in range(len(params))
    ]
    code = 'DistributedDataParallel(model, bucket_cap_mb="auto")'
    yield change("computed buckets", code, plan=plan_buckets(params, ready_s, costs.wire))
