"""A model of a recorded step: how long it would take with other messages. Pure.

[Note: how a step is predicted]
Gradients are ready when they were, on each rank. When all ranks have joined a bucket (see `timeline.py`) it
travels, one at a time, by the model of `tools/forecast/step_model.py`. The rank that ends backward last waits for
each bucket and copies it back. The rest of the step takes as long as recorded.

The costs are fitted to the recording (`Costs`). Not modelled: packing, launching, computing that becomes slower
while messages use the same cores, and small messages that travel side by side. Predicting the recorded step
unchanged shows the error.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from minddp.core.plan import BucketPlan
from minddp.tools.forecast.link import FREE, Link, fit_link
from minddp.tools.forecast.step_model import Message, simulate
from minddp.tools.xray.timeline import Activity, RecordedStep

SIZES_APART = 2  # times as large: nearer ones do not show a latency


@dataclass(frozen=True)
class Costs:
    """The costs by bytes of a message on the link and of copying back."""

    wire: Link
    copy: Link = FREE


def costs_of(steps: Sequence[RecordedStep], typical: RecordedStep) -> Costs | None:
    """Fitted to all buckets of `steps`. None if no message was seen to complete.

    The link is scaled so that the messages of the `typical` step take as long in total as recorded. A fit to single
    messages is not enough: the first may arrive late since its thread handles others before it.
    """
    link = _fitted(_wires(steps))
    if link is None:
        return None
    of_typical = list(_wires([typical]))
    fitted_ns, recorded_ns = 1e9 * sum(link.seconds(n) for n, _ in of_typical), sum(ns for _, ns in of_typical)
    ratio = max(1e-6, recorded_ns / fitted_ns) if fitted_ns else 1.0
    wire = replace(link, latency_s=link.latency_s * ratio, bytes_per_s=link.bytes_per_s / ratio)
    buckets = [bucket for step in steps for rank in step.ranks for bucket in rank.buckets]
    copies = (
        (bucket.nbytes, bucket.unpacked_ns - bucket.waited_ns)
        for bucket in buckets
        if bucket.waited_ns is not None and bucket.unpacked_ns is not None
    )
    return Costs(wire, _fitted(copies) or FREE)


def _wires(steps: Sequence[RecordedStep]) -> Iterator[tuple[int, int]]:
    """The bytes of each message, and its nanoseconds on the wire."""
    for step in steps:
        for rank in step.ranks:
            for bucket in rank.buckets:
                if wire := step.on_the_wire(bucket.index, rank):
                    yield bucket.nbytes, wire.length_ns


def _fitted(samples: Iterable[tuple[int, int]]) -> Link | None:
    """The link that best explains the median time of each size. Similar sizes show no latency: then it is 0."""
    times: dict[int, list[float]] = {}
    for nbytes, ns in samples:
        if nbytes and ns > 0:
            times.setdefault(nbytes, []).append(ns / 1e9)
    medians = {nbytes: statistics.median(of_size) for nbytes, of_size in times.items()}
    if medians and max(medians) >= SIZES_APART * min(medians):
        return fit_link(medians)
    return Link(0.0, sum(medians) / sum(medians.values())) if medians else None


def predicted_ns(step: RecordedStep, costs: Costs, plan: BucketPlan | None = None) -> float:
    """The length of the step at these costs, with the buckets of `plan`. See [Note: how a step is predicted]."""
    last = step.last
    end_ns = last.gradients_complete_ns + last.parts_ns[Activity.EXPOSED] + last.parts_ns[Activity.COPY_BACK]
    return step.length_ns + backward_end_ns(step, costs, plan) - end_ns


def backward_end_ns(step: RecordedStep, costs: Costs, plan: BucketPlan | None = None) -> float:
    """When all averages would be in .grad, at these costs and with the buckets of `plan`."""
    plan = plan or step.plan
    now_ns: float = step.last.gradients_complete_ns
    messages = []
    for bucket in plan.buckets:
        ready_ns = max(rank.last_ready_ns(bucket) for rank in step.ranks)
        joined_ns = min(now_ns, ready_ns + step.adds_after_ns)
        messages.append(Message(bucket.nbytes, (joined_ns - step.begin_ns) / 1e9))
    for bucket, arrival_s in zip(plan.buckets, simulate(messages, costs.wire), strict=True):
        now_ns = max(now_ns, step.begin_ns + 1e9 * arrival_s) + 1e9 * costs.copy.seconds(bucket.nbytes)
    return now_ns
