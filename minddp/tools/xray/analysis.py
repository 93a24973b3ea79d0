"""The analysis of one recording: its steps, the costs of messages, and the advice. All pictures use it.

Each change is tried on the model of `model.py`. Its gain is the difference to a prediction of the step as it is, so
an error that both predictions have cancels out. `tools/forecast/lateness.py` judges which ranks are late in each
step: see [Note: late ranks].
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan, plan_from_readiness
from minddp.options import MIB, BucketCaps
from minddp.platform.wording import ranks
from minddp.tools.forecast.lateness import RankTimes, late_ranks
from minddp.tools.forecast.link import FREE
from minddp.tools.forecast.planner import plan_buckets
from minddp.tools.xray.model import Costs, backward_end_ns, costs_of, predicted_ns, with_earlier
from minddp.tools.xray.reading import steps_of
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.timeline import Activity, RankStep, RecordedStep

LEAST_SHARE = 0.01  # of a step: gains below are not mentioned
FASTER = 10  # the link


@dataclass(frozen=True)
class WhatIf:
    """A change: in words, as code if there is any, the plan if it has other buckets, and by how much it gains."""

    title: str
    code: str = ""
    plan: BucketPlan | None = None
    gain_ns: float = 0.0


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
    def alike(self) -> list[RecordedStep]:
        """The steps that have the ranks of the typical one."""
        return [step for step in self.steps if len(step.ranks) == len(self.typical.ranks)]

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
        return [] if self.costs is None else what_ifs(self.recording, self.alike, self.typical, self.costs)

    @cached_property
    def advice(self) -> list[WhatIf]:
        """The gains that are not negligible, the largest first, with the best of all plans."""
        best = next((change for change in self.what_ifs if change.plan is not None), None)
        least_ns = LEAST_SHARE * self.typical.length_ns
        return [one for one in self.what_ifs if one.gain_ns >= least_ns and (one.plan is None or one is best)]


# ---------------------------------------------------------------------- changes


def what_ifs(
    recording: Recording, steps: Sequence[RecordedStep], typical: RecordedStep, costs: Costs
) -> list[WhatIf]:
    """All changes, the best first: of messages in the typical step, of late ranks in the median of all."""
    tried = [*_communication(recording, typical, costs)]
    if recording.has_plan:
        tried += [(change, costs) for change in _plans(typical, costs)]
    as_it_is_ns = backward_end_ns(typical, costs)
    found = [
        replace(change, gain_ns=as_it_is_ns - backward_end_ns(typical, then, change.plan)) for change, then in tried
    ]
    found += _late_ranks(steps, costs)
    return sorted(found, key=lambda change: change.gain_ns, reverse=True)


# ---------------------------------------------------------------------- late ranks


def _late_ranks(steps: Sequence[RecordedStep], costs: Costs) -> Iterator[WhatIf]:
    """The ranks that are late in each step, as quick as the others."""
    if len(steps[0].ranks) < 2:
        return
    before = [steps[0], *steps]  # what came before the first step is not known
    times = [
        [_times(*pair) for pair in zip(last.ranks, now.ranks, strict=True)]
        for last, now in zip(before, steps, strict=False)
    ]
    if not (late := late_ranks(times, LEAST_SHARE)):
        return
    late_ns = {one.rank: one.late_ns for one in late}
    gains_ns = []
    for step in steps:
        # The first rank sends the buffers: while it is late, others wait for them.
        buffers_ns = [min(rank.parts_ns[Activity.BUFFERS], late_ns.get(0, 0.0)) for rank in step.ranks]
        quicker = with_earlier(step, [late_ns.get(place, ns) for place, ns in enumerate(buffers_ns)])
        gains_ns.append(backward_end_ns(step, costs) - backward_end_ns(quicker, costs))
    names = ranks([steps[0].ranks[place].rank for place in late_ns])
    yield WhatIf(f"{names} as quick as the others", gain_ns=statistics.median(gains_ns))


def _times(last: RankStep, now: RankStep) -> RankTimes:
    """From the end of one backward to the end of the next, in two phases."""
    before = [span for span in last.busy if span.begin_ns >= last.gradients_complete_ns]
    since = [span for span in now.busy if span.begin_ns < now.gradients_complete_ns]
    between_ns, backward_ns = (sum(span.length_ns for span in spans) for spans in (before, since))
    waited_ns = now.parts_ns[Activity.EXPOSED] + now.parts_ns[Activity.BUFFERS]
    return RankTimes(between_ns, 0, backward_ns, 0, 0, waited_ns)


# ---------------------------------------------------------------------- communication


def _communication(recording: Recording, step: RecordedStep, costs: Costs) -> Iterator[tuple[WhatIf, Costs]]:
    """Changes with the costs of messages that they would have."""

    def times_as_fast(factor: float) -> Costs:
        return replace(costs, wire=replace(costs.wire, bytes_per_s=factor * costs.wire.bytes_per_s))

    yield WhatIf(f"a wire {FASTER} times as fast"), times_as_fast(FASTER)
    if not recording.has_plan:
        return
    has_hook = any(e.kind is EventKind.COMM_HOOK_RETURNED for rank in recording.ranks for e in rank.events)
    if not has_hook and {p.dtype for p in step.plan.params} == {torch.float32}:
        code = "ddp.register_comm_hook(None, fp16_compress_hook)"
        yield WhatIf("half the bytes, by a hook of lower precision", code), times_as_fast(2)
    if costs.copy is not FREE:
        yield WhatIf("no copy back", _wrapped("gradient_as_bucket_view=True")), replace(costs, copy=FREE)


def _wrapped(arguments: str) -> str:
    return f"DistributedDataParallel({', '.join(filter(None, ['model', arguments]))})"


def _plans(step: RecordedStep, costs: Costs) -> Iterator[WhatIf]:
    """Other buckets: the default, one, and those that `bucket_cap_mb="auto"` computes; each partition once."""
    params = step.plan.params
    ready_ns = {
        param: max(rank.ready_ns.get(param, rank.gradients_complete_ns) for rank in step.ranks)
        for param in range(len(params))
    }
    of_first = step.ranks[0].ready_ns
    order = sorted(ready_ns, key=lambda param: of_first.get(param, math.inf))

    def by_size(cap_mb: int | None) -> BucketPlan:
        return plan_from_readiness(params, order, BucketCaps.from_mib(cap_mb, None).after_rebuild())

    one_mb = math.ceil(step.plan.nbytes / MIB)
    computed = plan_buckets(params, [(ready_ns[p] - step.begin_ns) / 1e9 for p in ready_ns], costs.wire)
    seen = {_partition(step.plan)}
    for title, arguments, plan in (
        ("one bucket", f"bucket_cap_mb={one_mb}", by_size(one_mb)),
        ("default buckets: 1 MiB, then 25 MiB", "", by_size(None)),
        ("computed buckets", 'bucket_cap_mb="auto"', computed),
    ):
        if _partition(plan) not in seen:
            seen.add(_partition(plan))
            yield WhatIf(title, _wrapped(arguments), plan)


def _partition(plan: BucketPlan) -> Sequence[frozenset[int]]:
    return tuple(frozenset(slot.param for slot in bucket.slots) for bucket in plan.buckets)
