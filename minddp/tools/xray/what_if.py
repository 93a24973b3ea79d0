"""What would make a step shorter: the recorded steps played again, each time with one thing changed. Pure.

[Note: advice]
No rule says what is wrong. Each change is tried on the model of `replay.py`, and what it gains is compared with the
same model of the recording as it is, so that an error that both have does not count. Which ranks are late in each
step, follows from [Note: late ranks].
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan, plan_from_readiness
from minddp.options import MIB, BucketCaps
from minddp.platform.wording import joined, ranks, size
from minddp.tools.forecast.lateness import PHASES, RankTimes, costs_ns, late_ranks
from minddp.tools.forecast.planner import plan_buckets
from minddp.tools.xray.recording import Recording
from minddp.tools.xray.replay import FREE, Change, Costs, Phase, Replay, busy, replay
from minddp.tools.xray.timeline import Activity, RankStep, Step, spread_ns

LEAST_SHARE = 0.01  # of a step: gains below are not mentioned
FASTER = 10  # the wire
WITHOUT = {Phase.BETWEEN: "data ready: no time between steps", Phase.OPTIMIZER: "an optimizer that takes no time"}
WITHOUT_LOADER = {Phase.DATA: "data ready: no wait for the loader", Phase.BETWEEN: "only the loader between steps"}
STANDS_OUT = 0.1, 12.0  # a delay: more than this share of a step, and times the quartile of all costs
EARLY = (Phase.BETWEEN, Phase.OPTIMIZER, Phase.DATA)  # before a backward, they lie in the step before
_ALSO = (Activity.LOSS.value, "in the data loader")
NAMES = dict(zip(Phase, ("between steps", *PHASES[1:], *_ALSO), strict=True))
Factors = Mapping[tuple[int, int, Phase], float]


@dataclass(frozen=True)
class WhatIf:
    """A change, in words and, if there are any, as arguments or calls; `of_plan`: it changes the buckets, `ranks`:
    it makes these quicker.

    `gain_ns` is by how much it makes a step shorter on average, `evens_ns` by how much less steps differ (see
    `spread_ns`), `step` a recorded one as it would be then.
    """

    title: str
    code: str
    of_plan: bool
    ranks: tuple[int, ...]
    step_ns: float
    gain_ns: float
    evens_ns: float
    step: Step


def what_ifs(recording: Recording, steps: Sequence[Step], shown: int, costs: Costs) -> list[WhatIf]:
    """All changes, the best first; the first of all is none. `steps[shown]` is the typical one."""
    as_it_is = replay(steps, costs)
    tried = [*_phases(steps), *_communication(recording, steps, costs)]
    if recording.has_plan:
        tried += _plans(steps[shown], costs)
    found = [_outcome(change, replay(steps, costs, change), as_it_is, shown) for change in tried]
    unchanged = _outcome(Change(), as_it_is, as_it_is, shown)
    return [unchanged, *sorted(found, key=lambda one: one.gain_ns, reverse=True)]


def _outcome(change: Change, then: Replay, as_it_is: Replay, shown: int) -> WhatIf:
    step = then.steps[shown if change.shown is None else change.shown]
    gain_ns = as_it_is.step_ns - then.step_ns
    evens_ns = spread_ns(as_it_is.steps) - spread_ns(then.steps)
    return WhatIf(
        change.title, change.code, change.plan is not None, change.ranks, then.step_ns, gain_ns, evens_ns, step
    )


# ---------------------------------------------------------------------- what ranks do


def _phases(steps: Sequence[Step]) -> Iterator[Change]:
    if len(steps[0].ranks) > 1:
        yield from _late(Cycles(steps))
    loads = any(rank.parts_ns[Activity.DATA] for step in steps for rank in step.ranks)
    for phase, title in (WITHOUT | WITHOUT_LOADER if loads else WITHOUT).items():
        nothing = {(t, rank.rank, phase): 0.0 for t, step in enumerate(steps) for rank in step.ranks}
        yield Change(factors=nothing, title=title)


def _late(cycles: Cycles) -> Iterator[Change]:
    """Late ranks as quick as the others: in each phase, in all; then no delays in single steps."""
    late = late_ranks(cycles.times, LEAST_SHARE)
    by_phase: dict[Phase, Factors] = {}
    for phase in Phase:
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
    yield from _delays(cycles, {one.rank for one in late if one.in_steps == 1})


def _as_quick(cycles: Cycles, factors: Factors, places: Iterable[int], phases: Sequence[Phase]) -> Change:
    late = tuple(cycles.steps[0].ranks[place].rank for place in places)
    title = f"{ranks(late)} as quick as the others {joined([NAMES[phase] for phase in phases])}"
    return Change(factors=factors, title=title, ranks=late)


def _delays(cycles: Cycles, known: set[int]) -> Iterator[Change]:
    """What stands out in single steps from the quiet ones, of ranks that are not known to be late."""
    by_rank = list(zip(*map(costs_ns, cycles.times), strict=True))
    share, quartiles = STANDS_OUT
    quiet_ns = statistics.quantiles([abs(cost) for costs in by_rank for cost in costs], n=4)[0]
    least_ns = max(share * cycles.step_ns, quartiles * quiet_ns)
    places = [place for place in range(len(by_rank)) if place not in known]
    found = [(t, place) for place in places for t, cost in enumerate(by_rank[place]) if cost > least_ns]
    if not found:
        return
    factors = dict(
        cycles.shorter(t, place, phase, cycles.behind_ns(t, place, phase)) for t, place in found for phase in Phase
    )
    worst, place = max(found, key=lambda where: by_rank[where[1]][where[0]])
    most = NAMES[max(Phase, key=lambda phase: cycles.behind_ns(worst, place, phase))]
    step = cycles.steps[worst]
    late = step.ranks[place].rank
    which = f"rank {late} by {by_rank[place][worst] / 1e6:.1f} ms {most}, step {step.number}"
    title = f"no delays in single steps ({len(found)} of {len(cycles.steps)}; the longest: {which})"
    yield Change(factors=factors, title=title, ranks=(late,), shown=worst)


class Cycles:
    """The time from the end of one backward to the next, by step, place of the rank, and phase.

    What precedes the first is not known, so that counts as if it followed itself. X-ray knows when backward begins:
    for `times`, what lies between forward and backward is a part of forward.
    """

    def __init__(self, steps: Sequence[Step]):
        self.steps = steps
        own = [[_by_phase(rank) for rank in step.ranks] for step in steps]
        self.busy_ns = [
            [
                {phase: (last if phase in EARLY else now)[phase] for phase in Phase}
                for last, now in zip(own[max(0, t - 1)], own[t], strict=True)
            ]
            for t in range(len(own))
        ]
        self.times = [
            [_rank_times(rank, busy_ns) for rank, busy_ns in zip(step.ranks, of_step, strict=True)]
            for step, of_step in zip(steps, self.busy_ns, strict=True)
        ]
        self.step_ns = statistics.median(sum(step[0]) for step in self.times)

    def behind_ns(self, t: int, place: int, phase: Phase) -> float:
        """How much longer a rank is busy than the median other one; negative if it is quicker."""
        lengths = [busy_ns[phase] for busy_ns in self.busy_ns[t]]
        return lengths.pop(place) - statistics.median(lengths)

    def usually_behind_ns(self, place: int, phase: Phase) -> float:
        return statistics.median(self.behind_ns(t, place, phase) for t in range(len(self.steps)))

    def shorter(self, t: int, place: int, phase: Phase, by_ns: float) -> tuple[tuple[int, int, Phase], float]:
        """The factor for a phase before the end of backward t; some of it lies in the step before."""
        recorded_in = max(0, t - 1) if phase in EARLY else t
        factor = 1 - by_ns / max(1, self.busy_ns[t][place][phase])
        return (recorded_in, self.steps[0].ranks[place].rank, phase), min(1.0, max(0.0, factor))


def _by_phase(rank: RankStep) -> dict[Phase, int]:
    lengths = dict.fromkeys(Phase, 0)
    for span, phase in busy(rank):
        lengths[phase] += span.length_ns
    return lengths


def _rank_times(rank: RankStep, busy_ns: Mapping[Phase, int]) -> RankTimes:
    between, forward, backward, optimizer, accumulation, loss, data = (busy_ns[phase] for phase in Phase)
    waited = rank.parts_ns[Activity.EXPOSED] + rank.parts_ns[Activity.BUFFERS]
    return RankTimes(between + data, forward + loss, backward, optimizer, accumulation, waited)


# ---------------------------------------------------------------------- communication


def _communication(recording: Recording, steps: Sequence[Step], costs: Costs) -> Iterator[Change]:
    def times_as_fast(factor: float, title: str, code: str = "") -> Change:
        wire = replace(costs.wire, bytes_per_s=factor * costs.wire.bytes_per_s)
        return Change(costs=lambda c: replace(c, wire=wire), title=title, code=code)

    yield times_as_fast(FASTER, f"a wire {FASTER} times as fast")
    has_hook = any(e.kind is EventKind.COMM_HOOK_RETURNED for rank in recording.ranks for e in rank.events)
    if not has_hook and recording.has_plan and {p.dtype for p in steps[0].plan.params} == {torch.float32}:
        code = "ddp.register_comm_hook(None, fp16_compress_hook)"
        yield times_as_fast(2, "half the bytes, by a hook of lower precision", code)
    if costs.copy is not FREE and recording.has_plan:
        code = _wrapped("gradient_as_bucket_view=True")
        yield Change(costs=lambda c: replace(c, copy=FREE), title="no copy back", code=code)


def _wrapped(arguments: str) -> str:
    return f"DistributedDataParallel({', '.join(filter(None, ['model', arguments]))})"


def _plans(step: Step, costs: Costs) -> Iterator[Change]:
    """Other buckets; each partition once."""
    seen = {_partition(step.plan)}
    for title, arguments, plan in [*_settings(step), _computed(step, costs)]:
        if _partition(plan) not in seen:
            seen.add(_partition(plan))
            yield Change(plan, title=title, code=_wrapped(arguments))


def _settings(step: Step) -> Iterator[tuple[str, str, BucketPlan]]:
    """Common settings, from one bucket to one per parameter, and an earlier first one."""
    specs, order = step.plan.params, ready_order(step)
    total_mib = step.plan.nbytes / MIB
    largest = math.floor(math.log2(max(total_mib, 2**-8) / 1.5))
    halves = [2.0**exponent for exponent in range(largest, largest - 5, -1)]
    earlier_mib = step.plan.buckets[0].nbytes / MIB / 4
    rest_mib = max(bucket.nbytes for bucket in step.plan.buckets) / MIB
    settings: list[tuple[str, float | None, float | None]] = [
        ("one bucket", math.ceil(total_mib), None),
        ("a bucket per parameter", 0, None),
        ("default buckets: 1 MiB, then 25 MiB", None, None),
        *((f"buckets of {size(cap * MIB)}", cap, None) for cap in halves),
        (f"the first bucket earlier: {size(earlier_mib * MIB)}", rest_mib, earlier_mib),
    ]
    for title, cap_mb, first_mb in settings:
        caps_bytes = BucketCaps.from_mib(cap_mb, None, first_mb).after_rebuild()
        named = {"bucket_cap_mb": cap_mb, "first_bucket_cap_mb": first_mb}
        code = ", ".join(f"{name}={value:.12g}" for name, value in named.items() if value is not None)
        yield title, code, plan_from_readiness(specs, order, caps_bytes)


def _computed(step: Step, costs: Costs) -> tuple[str, str, BucketPlan]:
    """The plan that `bucket_cap_mb="auto"` makes of these times."""
    never_ns = max(rank.gradients_complete_ns or 0 for rank in step.ranks)
    ready_s = [
        (max(rank.ready_ns.get(param, never_ns) for rank in step.ranks) - step.begin_ns) / 1e9
        for param in range(len(step.plan.params))
    ]
    return "computed buckets", 'bucket_cap_mb="auto"', plan_buckets(step.plan.params, ready_s, costs.wire)


def ready_order(step: Step) -> list[int]:
    """The order in which gradients arrived on the first rank; those that did not, last."""
    ready_ns = step.ranks[0].ready_ns
    return sorted(range(len(step.plan.params)), key=lambda param: ready_ns.get(param, math.inf))


def _partition(plan: BucketPlan) -> Sequence[frozenset[int]]:
    return tuple(frozenset(slot.param for slot in bucket.slots) for bucket in plan.buckets)
