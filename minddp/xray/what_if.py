"""The recorded step under other plans and with other numbers of ranks. Pure.

[Note: what is predicted]
Messages take what a link fitted to the recording says, by the model of `forecast/step_model.py`. Gradients become
ready when they did in the recorded step, and the rest of the step stays as it was. What this leaves out: that
communication slows down backward where both need the same cores, what a bucket costs the thread that trains, and
that small messages may travel side by side. So it is meaningful for plans that are not too far from the recorded
one; predicting that one as well shows how far to trust it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from minddp.core.plan import BucketPlan, plan_from_readiness
from minddp.forecast.link import Link, fit_link
from minddp.forecast.planner import plan_buckets
from minddp.forecast.step_model import Message, simulate
from minddp.options import MIB, BucketCaps
from minddp.platform.wording import size
from minddp.xray.timeline import Activity, BucketHistory, Interval, RankStep, Span, Step


@dataclass(frozen=True)
class Fit:
    """A link as the recorded messages show it, and their number.

    Messages of one size do not show which part of their time was latency; it then counts as none.
    """

    link: Link
    messages: int
    separates_latency: bool


def fit(steps: Sequence[Step]) -> Fit | None:
    """The link that explains best the median time of each size of message. None if none was seen to complete."""
    times_of: dict[int, list[float]] = {}
    for step in steps:
        for rank in step.ranks:
            for bucket in rank.buckets:
                wire = step.on_the_wire(bucket.index, rank)
                if wire is not None and wire.length_ns and bucket.nbytes:
                    times_of.setdefault(bucket.nbytes, []).append(wire.length_ns / 1e9)
    if not times_of:
        return None
    medians = {nbytes: statistics.median(times) for nbytes, times in times_of.items()}
    (nbytes, seconds), *others = medians.items()
    link = fit_link(medians) if others else Link(0.0, nbytes / seconds)
    return Fit(link, sum(map(len, times_of.values())), separates_latency=bool(others))


# ---------------------------------------------------------------------- a prediction


def predict(step: Step, plan: BucketPlan, link: Link) -> Step:
    """`step`, which must be complete, with its gradients in the buckets of `plan`.

    Each rank is as recorded in backward, then waits and copies, then as recorded again. Buckets are launched when
    the wire is free for them, on all ranks alike.
    """
    messages = [
        Message(bucket.nbytes, _ready_s(step, [slot.param for slot in bucket.slots])) for bucket in plan.buckets
    ]
    wires = [Interval(*(step.begin_ns + round(t * 1e9) for t in transfer)) for transfer in simulate(messages, link)]
    return replace(step, ranks=tuple(_predicted_rank(rank, plan, wires) for rank in step.ranks))


def _predicted_rank(rank: RankStep, plan: BucketPlan, wires: Sequence[Interval]) -> RankStep:
    spans = tuple(span for span in _predicted_spans(rank, plan, wires) if span.length_ns)
    buckets = tuple(
        BucketHistory(bucket.index, bucket.nbytes, launched_ns=wire.begin_ns, completed_ns=wire.end_ns)
        for bucket, wire in zip(plan.buckets, wires, strict=True)
    )
    interval = Interval(spans[0].begin_ns, spans[-1].end_ns)
    return replace(rank, interval=interval, spans=spans, buckets=buckets, plan=plan)


def _ready_s(step: Step, params: Sequence[int]) -> float:
    """When the gradients of `params` are ready on all ranks, in seconds since the step began.

    If a rank has recorded none of them, when its backward ends.
    """
    known = [[rank.ready_ns[p] for p in params if p in rank.ready_ns] for rank in step.ranks]
    ready_ns = max(max(times, default=_complete_ns(rank)) for rank, times in zip(step.ranks, known, strict=True))
    return (ready_ns - step.begin_ns) / 1e9


def _predicted_spans(rank: RankStep, plan: BucketPlan, wires: Sequence[Interval]) -> Iterator[Span]:
    now_ns = complete_ns = _complete_ns(rank)
    copy_ns_per_byte = rank.parts_ns[Activity.COPY_BACK] / max(1, plan.nbytes)
    yield from (span for span in rank.spans if span.end_ns <= complete_ns)
    for bucket, wire in zip(plan.buckets, wires, strict=True):
        copy_begins_ns = max(now_ns, wire.end_ns)
        copy_ends_ns = copy_begins_ns + round(copy_ns_per_byte * bucket.nbytes)
        yield Span(Activity.EXPOSED, now_ns, copy_begins_ns, bucket.index)
        yield Span(Activity.COPY_BACK, copy_begins_ns, copy_ends_ns, bucket.index)
        now_ns = copy_ends_ns
    for span in rank.spans:
        if span.end_ns > complete_ns and span.activity not in (Activity.EXPOSED, Activity.COPY_BACK):
            yield replace(span, begin_ns=now_ns, end_ns=now_ns + span.length_ns)
            now_ns += span.length_ns


def _complete_ns(rank: RankStep) -> int:
    complete_ns = rank.gradients_complete_ns
    assert complete_ns is not None, "a complete step has the end of its backward"
    return complete_ns


# ---------------------------------------------------------------------- other plans, other numbers of ranks


@dataclass(frozen=True)
class Alternative:
    """A plan, in words, the arguments of `DistributedDataParallel` that make it, as code, and its prediction."""

    title: str
    code: str
    prediction: Step


def alternatives(step: Step, link: Link) -> list[Alternative]:
    """The recorded plan, then settings from few buckets to many, then a computed plan; each partition once."""
    recorded = Alternative("as recorded", "", predict(step, step.plan, link))
    others = {_partition(step.plan): recorded}
    for title, code, plan in [*_settings(step), _computed(step, link)]:
        if _partition(plan) not in others:
            others[_partition(plan)] = Alternative(title, code, predict(step, plan, link))
    recorded, *rest = others.values()
    return [recorded, *sorted(rest, key=lambda other: ("auto" in other.code, len(other.prediction.plan.buckets)))]


def _settings(step: Step) -> Iterator[tuple[str, str, BucketPlan]]:
    """Common settings, from one bucket to one per parameter."""
    specs, order = step.plan.params, ready_order(step)
    total_mib = step.plan.nbytes / MIB
    largest = math.floor(math.log2(max(total_mib, 2**-8) / 1.5))
    halves = [2.0**exponent for exponent in range(largest, largest - 5, -1)]
    settings: list[tuple[str, float | None]] = [
        ("one bucket", math.ceil(total_mib)),
        ("a bucket per parameter", 0),
        ("default: 1 MiB, then 25 MiB", None),
        *((f"buckets of {size(cap * MIB)}", cap) for cap in halves),
    ]
    for title, cap_mb in settings:
        caps_bytes = BucketCaps.from_mib(cap_mb, None).after_rebuild()
        code = "" if cap_mb is None else f"bucket_cap_mb={cap_mb:.12g}"
        yield title, code, plan_from_readiness(specs, order, caps_bytes)


def _computed(step: Step, link: Link) -> tuple[str, str, BucketPlan]:
    """The plan that `bucket_cap_mb="auto"` makes of these times."""
    ready_s = [_ready_s(step, [param]) for param in range(len(step.plan.params))]
    plan = plan_buckets(step.plan.params, ready_s, link)
    return "computed for this step", 'bucket_cap_mb="auto"', plan


def ready_order(step: Step) -> list[int]:
    """The order in which gradients arrived on the first rank; those that did not, last."""
    ready_ns = step.ranks[0].ready_ns
    return sorted(range(len(step.plan.params)), key=lambda param: ready_ns.get(param, math.inf))


def _partition(plan: BucketPlan) -> Sequence[frozenset[int]]:
    return tuple(frozenset(slot.param for slot in bucket.slots) for bucket in plan.buckets)


def with_other_ranks(step: Step, link: Link) -> dict[int, Step]:
    """The recorded plan with 2, 4 and 8 times as many ranks in a ring; none for one rank, which sends nothing."""
    ranks = step.world_size
    numbers = [ranks * factor for factor in (2, 4, 8)] if ranks > 1 else []
    return {n: predict(step, step.plan, link.with_ranks(n, instead_of=ranks)) for n in numbers}
