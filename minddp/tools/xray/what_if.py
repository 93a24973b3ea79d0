"""The changes that would make a step shorter: the recorded steps, simulated again with one thing changed. Pure.

No rule says what is wrong. Each change is tried on the model of `replay.py`. Its gain is the difference to a
simulation of the recording as it is, so an error that both simulations have cancels out.
`tools/forecast/lateness.py` judges which ranks are late in each step: see [Note: late ranks].
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan, plan_from_readiness
from minddp.options import MIB, BucketCaps
from minddp.platform.wording import joined, ranks
from minddp.tools.forecast.lateness import RankTimes, WorkPhase, late_ranks
from minddp.tools.forecast.planner import plan_buckets
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.replay import FREE, Costs, Factors, busy, replay
from minddp.tools.xray.timeline import Activity, RankStep, RecordedStep

LEAST_SHARE = 0.01  # of a step: gains below are not mentioned
FASTER = 10  # the link
EARLY = (WorkPhase.BETWEEN, WorkPhase.OPTIMIZER)  # before a backward, they lie in the step before


@dataclass(frozen=True)
class WhatIf:
    """A change: in words, as code if there is any, and as the scenario that is simulated in place of the recording.

    `ranks` are those that become quicker. A step takes `step_ns` on average, shorter by `gain_ns`. The typical step
    is simulated, unchanged, as `typical_ns`.
    """

    title: str
    code: str = ""
    plan: BucketPlan | None = None
    costs: Costs | None = None
    factors: Factors = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    step_ns: float = 0.0
    gain_ns: float = 0.0
    typical_ns: int = 0


def what_ifs(
    recording: Recording, steps: Sequence[RecordedStep], typical: RecordedStep, costs: Costs
) -> list[WhatIf]:
    """All changes, the best first; the first of all is none."""
    as_it_is = replay(steps, costs)

    def outcome(change: WhatIf) -> WhatIf:
        then = replay(steps, change.costs or costs, change.plan, change.factors)
        return replace(change, step_ns=then.step_ns, gain_ns=as_it_is.step_ns - then.step_ns)

    tried = [*_phases(steps), *_communication(recording, typical, costs)]
    if recording.has_plan:
        tried += _plans(typical, costs)
    typical_ns = as_it_is.steps[steps.index(typical)].length_ns
    unchanged = WhatIf("as recorded", step_ns=as_it_is.step_ns, typical_ns=typical_ns)
    return [unchanged, *sorted(map(outcome, tried), key=lambda one: one.gain_ns, reverse=True)]


# ---------------------------------------------------------------------- the work of ranks


def _phases(steps: Sequence[RecordedStep]) -> Iterator[WhatIf]:
    if len(steps[0].ranks) > 1:
        yield from _late(Cycles(steps))
    for phase, title in (
        (WorkPhase.BETWEEN, "data ready: no time between steps"),
        (WorkPhase.OPTIMIZER, "an optimizer that takes no time"),
    ):
        nothing = {(t, rank.rank, phase): 0.0 for t, step in enumerate(steps) for rank in step.ranks}
        yield WhatIf(title, factors=nothing)


def _late(cycles: Cycles) -> Iterator[WhatIf]:
    """Late ranks as quick as the others: in each phase, then in all."""
    late = late_ranks(cycles.times, LEAST_SHARE)
    by_phase: dict[WorkPhase, Factors] = {}
    for phase in WorkPhase:
        behind_ns = {one.rank: min(one.late_ns, cycles.usually_behind_ns(one.rank, phase)) for one in late}
        behind_ns = {place: ns for place, ns in behind_ns.items() if ns > LEAST_SHARE * cycles.step_ns}
        if behind_ns:
            by_phase[phase] = dict(
                cycles.shorter(t, place, phase, by_ns)
                for place, by_ns in behind_ns.items()
                for t in range(len(cycles.steps))
            )
            yield _as_quick(cycles, by_phase[phase], behind_ns, [phase])
    if len(by_phase) > 1:
        every = {key: factor for factors in by_phase.values() for key, factor in factors.items()}
        yield _as_quick(cycles, every, [one.rank for one in late], list(by_phase))


def _as_quick(cycles: Cycles, factors: Factors, places: Iterable[int], phases: Sequence[WorkPhase]) -> WhatIf:
    late = tuple(cycles.steps[0].ranks[place].rank for place in places)
    title = f"{ranks(late)} as quick as the others {joined([phase.value for phase in phases])}"
    return WhatIf(title, factors=factors, ranks=late)


class Cycles:
    """The time from the end of one backward to the next, by step, place of the rank, and phase.

    The phases before the first backward are not known, so they count as if the first step followed itself. X-ray
    knows when backward begins, so in `times` the phase between forward and backward belongs to forward.
    """

    def __init__(self, steps: Sequence[RecordedStep]):
        self.steps = steps
        own = [[_by_phase(rank) for rank in step.ranks] for step in steps]
        self.busy_ns = [
            [
                {phase: (last if phase in EARLY else now)[phase] for phase in WorkPhase}
                for last, now in zip(own[max(0, t - 1)], own[t], strict=True)
            ]
            for t in range(len(own))
        ]
        self.times = [
            [_rank_times(rank, busy_ns) for rank, busy_ns in zip(step.ranks, of_step, strict=True)]
            for step, of_step in zip(steps, self.busy_ns, strict=True)
        ]
        self.step_ns = statistics.median(sum(step[0]) for step in self.times)

    def behind_ns(self, t: int, place: int, phase: WorkPhase) -> float:
        """How much longer a rank is busy than the median of the others; negative if it is quicker."""
        lengths = [busy_ns[phase] for busy_ns in self.busy_ns[t]]
        return lengths.pop(place) - statistics.median(lengths)

    def usually_behind_ns(self, place: int, phase: WorkPhase) -> float:
        return statistics.median(self.behind_ns(t, place, phase) for t in range(len(self.steps)))

    def shorter(
        self, t: int, place: int, phase: WorkPhase, by_ns: float
    ) -> tuple[tuple[int, int, WorkPhase], float]:
        """The factor for a phase before the end of backward t; some of it lies in the step before."""
        recorded_in = max(0, t - 1) if phase in EARLY else t
        factor = 1 - by_ns / max(1, self.busy_ns[t][place][phase])
        return (recorded_in, self.steps[0].ranks[place].rank, phase), min(1.0, max(0.0, factor))


def _by_phase(rank: RankStep) -> dict[WorkPhase, int]:
    lengths = dict.fromkeys(WorkPhase, 0)
    for span, phase in busy(rank):
        lengths[phase] += span.length_ns
    return lengths


def _rank_times(rank: RankStep, busy_ns: Mapping[WorkPhase, int]) -> RankTimes:
    return RankTimes(
        between_ns=busy_ns[WorkPhase.BETWEEN],
        forward_ns=busy_ns[WorkPhase.FORWARD] + busy_ns[WorkPhase.LOSS],
        backward_ns=busy_ns[WorkPhase.BACKWARD],
        optimizer_ns=busy_ns[WorkPhase.OPTIMIZER],
        accumulation_ns=busy_ns[WorkPhase.ACCUMULATION],
        waited_ns=rank.parts_ns[Activity.EXPOSED] + rank.parts_ns[Activity.BUFFERS],
    )


# ---------------------------------------------------------------------- communication


def _communication(recording: Recording, step: RecordedStep, costs: Costs) -> Iterator[WhatIf]:
    def times_as_fast(factor: float) -> Costs:
        return replace(costs, wire=replace(costs.wire, bytes_per_s=factor * costs.wire.bytes_per_s))

    yield WhatIf(f"a wire {FASTER} times as fast", costs=times_as_fast(FASTER))
    if not recording.has_plan:
        return
    has_hook = any(e.kind is EventKind.COMM_HOOK_RETURNED for rank in recording.ranks for e in rank.events)
    if not has_hook and {p.dtype for p in step.plan.params} == {torch.float32}:
        code = "ddp.register_comm_hook(None, fp16_compress_hook)"
        yield WhatIf("half the bytes, by a hook of lower precision", code, costs=times_as_fast(2))
    if costs.copy is not FREE:
        yield WhatIf("no copy back", _wrapped("gradient_as_bucket_view=True"), costs=replace(costs, copy=FREE))


def _wrapped(arguments: str) -> str:
    return f"DistributedDataParallel({', '.join(filter(None, ['model', arguments]))})"


def _plans(step: RecordedStep, costs: Costs) -> Iterator[WhatIf]:
    """Other buckets; each partition once."""
    seen = {_partition(step.plan)}
    for title, arguments, plan in [*_settings(step), _computed(step, costs)]:
        if _partition(plan) not in seen:
            seen.add(_partition(plan))
            yield WhatIf(title, _wrapped(arguments), plan)


def _settings(step: RecordedStep) -> Iterator[tuple[str, str, BucketPlan]]:
    """The default, one bucket, and one per parameter."""
    ready_ns = step.ranks[0].ready_ns
    order = sorted(range(len(step.plan.params)), key=lambda param: ready_ns.get(param, math.inf))
    settings: list[tuple[str, int | None]] = [
        ("one bucket", math.ceil(step.plan.nbytes / MIB)),
        ("a bucket per parameter", 0),
        ("default buckets: 1 MiB, then 25 MiB", None),
    ]
    for title, cap_mb in settings:
        caps_bytes = BucketCaps.from_mib(cap_mb, None).after_rebuild()
        yield (
            title,
            "" if cap_mb is None else f"bucket_cap_mb={cap_mb}",
            plan_from_readiness(step.plan.params, order, caps_bytes),
        )


def _computed(step: RecordedStep, costs: Costs) -> tuple[str, str, BucketPlan]:
    """The plan that `bucket_cap_mb="auto"` makes of these times."""
    never_ns = max(rank.gradients_complete_ns for rank in step.ranks)
    ready_s = [
        (max(rank.ready_ns.get(param, never_ns) for rank in step.ranks) - step.begin_ns) / 1e9
        for param in range(len(step.plan.params))
    ]
    return "computed buckets", 'bucket_cap_mb="auto"', plan_buckets(step.plan.params, ready_s, costs.wire)


def _partition(plan: BucketPlan) -> Sequence[frozenset[int]]:
    return tuple(frozenset(slot.param for slot in bucket.slots) for bucket in plan.buckets)
