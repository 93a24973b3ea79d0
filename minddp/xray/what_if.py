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
from minddp.xray.recording import Layout
from minddp.xray.timeline import Activity, Interval, RankStep, Span, Step


@dataclass(frozen=True)
class Fit:
    """A link as the recorded messages show it: their number, and how many different sizes they had."""

    link: Link
    messages: int
    sizes: int

    @property
    def separates_latency(self) -> bool:
        """Messages of one size do not show which part of their time was latency; it then counts as none."""
        return self.sizes > 1


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
    return Fit(link, sum(map(len, times_of.values())), len(medians))


# ---------------------------------------------------------------------- a prediction


@dataclass(frozen=True)
class PredictedRank:
    """One rank's step, tiled by `spans`: as recorded in backward, then waits and copies, then the recorded rest."""

    spans: tuple[Span, ...]

    @property
    def length_ns(self) -> int:
        return self.spans[-1].end_ns - self.spans[0].begin_ns

    @property
    def waits(self) -> list[Span]:
        return [span for span in self.spans if span.activity is Activity.EXPOSED]


@dataclass(frozen=True)
class Prediction:
    """The step with `layout`; `wires` are when each bucket's bytes move, on all ranks alike."""

    layout: Layout
    wires: tuple[Interval, ...]
    ranks: tuple[PredictedRank, ...]

    @property
    def length_ns(self) -> int:
        return max(rank.length_ns for rank in self.ranks)


def predict(step: Step, layout: Layout, link: Link) -> Prediction:
    """`step`, which must be complete, with its gradients in the buckets of `layout`."""
    messages = [Message(bucket.nbytes, _ready_s(step, bucket.params)) for bucket in layout.buckets]
    wires = tuple(
        Interval(*(step.begin_ns + round(t * 1e9) for t in transfer)) for transfer in simulate(messages, link)
    )
    spans = (_predicted_spans(rank, layout, wires) for rank in step.ranks)
    ranks = tuple(PredictedRank(tuple(span for span in of_rank if span.length_ns)) for of_rank in spans)
    return Prediction(layout, wires, ranks)


def _ready_s(step: Step, params: Sequence[int]) -> float:
    """When the gradients of `params` are ready on all ranks, in seconds since the step began.

    If a rank has recorded none of them, when its backward ends.
    """
    known = [[rank.ready_ns[p] for p in params if p in rank.ready_ns] for rank in step.ranks]
    ready_ns = max(max(times, default=_complete_ns(rank)) for rank, times in zip(step.ranks, known, strict=True))
    return (ready_ns - step.begin_ns) / 1e9


def _predicted_spans(rank: RankStep, layout: Layout, wires: Sequence[Interval]) -> Iterator[Span]:
    now_ns = complete_ns = _complete_ns(rank)
    copy_ns_per_byte = rank.parts_ns[Activity.COPY_BACK] / max(1, layout.nbytes)
    yield from (span for span in rank.spans if span.end_ns <= complete_ns)
    for index, (bucket, wire) in enumerate(zip(layout.buckets, wires, strict=True)):
        copy_begins_ns = max(now_ns, wire.end_ns)
        copy_ends_ns = copy_begins_ns + round(copy_ns_per_byte * bucket.nbytes)
        yield Span(Activity.EXPOSED, now_ns, copy_begins_ns, index)
        yield Span(Activity.COPY_BACK, copy_begins_ns, copy_ends_ns, index)
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
    prediction: Prediction


def alternatives(step: Step, link: Link) -> list[Alternative]:
    """The recorded plan, then settings from few buckets to many, then a computed plan; each partition once."""
    recorded = Alternative("as recorded", "", predict(step, step.layout, link))
    others = {_partition(step.layout): recorded}
    for title, code, plan in [*_settings(step), _computed(step, link)]:
        layout = Layout.of(plan)
        if _partition(layout) not in others:
            others[_partition(layout)] = Alternative(title, code, predict(step, layout, link))
    recorded, *rest = others.values()
    return [recorded, *sorted(rest, key=lambda plan: ("auto" in plan.code, len(plan.prediction.layout.buckets)))]


def _settings(step: Step) -> Iterator[tuple[str, str, BucketPlan]]:
    """Common settings, from one bucket to one per parameter."""
    specs, order = step.layout.specs(), ready_order(step)
    total_mib = step.layout.nbytes / MIB
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
    ready_s = [_ready_s(step, [param]) for param in range(len(step.layout.params))]
    plan = plan_buckets(step.layout.specs(), ready_s, link)
    return "computed for this step", 'bucket_cap_mb="auto"', plan


def ready_order(step: Step) -> list[int]:
    """The order in which gradients arrived on the first rank; those that did not, last."""
    ready_ns = step.ranks[0].ready_ns
    return sorted(range(len(step.layout.params)), key=lambda param: ready_ns.get(param, math.inf))


def _partition(layout: Layout) -> Sequence[frozenset[int]]:
    return tuple(frozenset(bucket.params) for bucket in layout.buckets)


def with_other_ranks(step: Step, link: Link) -> dict[int, Prediction]:
    """The recorded plan with 2, 4 and 8 times as many ranks in a ring; none for one rank, which sends nothing."""
    ranks = step.world_size
    numbers = [ranks * factor for factor in (2, 4, 8)] if ranks > 1 else []
    return {n: predict(step, step.layout, link.with_ranks(n, instead_of=ranks)) for n in numbers}
