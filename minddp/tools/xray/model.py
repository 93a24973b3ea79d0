"""A model of a recorded step: how long it would take with other messages. Pure.

[Note: how a step is predicted]
Gradients are ready when they were, on each rank. A rank launches a bucket when its last gradient is packed and all
buckets before it are launched. When all ranks have joined (see `timeline.py`) it travels, one at a time, by the
model of `tools/forecast/step_model.py`. The rank that ends backward last waits for each bucket and copies it back.
The rest of the step takes as long as recorded. More buckets make backward longer, by a launch each.

The costs are fitted to the recording (`Costs`). Not modelled: computing becomes slower while messages use the same
cores, and small messages may travel side by side. Predicting the recorded step unchanged shows the error.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from minddp.core.plan import BucketPlan
from minddp.tools.forecast.link import FREE, Link, fit_link
from minddp.tools.forecast.step_model import Message, simulate
from minddp.tools.xray.timeline import Activity, RankStep, RecordedStep

SIZES_APART = 2  # times as large: nearer ones do not show a latency


@dataclass(frozen=True)
class Costs:
    """The costs by bytes of a message on the link, of packing and of copying back, fitted to `messages`."""

    wire: Link
    messages: int
    pack: Link = FREE
    copy: Link = FREE
    launch_ns: float = 0.0


def costs_of(steps: Sequence[RecordedStep], typical: RecordedStep) -> Costs | None:
    """Fitted to all buckets of `steps`. None if no message was seen to complete.

    The link is scaled so that the messages of the `typical` step take as long in total as recorded. A fit to single
    messages is not enough: the first may arrive late since its thread handles others before it.
    """
    wires, packs, copies, launches_ns = _Samples(), _Samples(), _Samples(), list[int]()
    for step in steps:
        for rank in step.ranks:
            for bucket in rank.buckets:
                wire = step.on_the_wire(bucket.index, rank)
                wires.add(bucket.nbytes, wire.length_ns if wire else 0)
                if bucket.ready_ns is not None and bucket.filled_ns is not None:
                    packs.add(bucket.nbytes, bucket.ready_ns - bucket.filled_ns)
                if bucket.waited_ns is not None and bucket.unpacked_ns is not None:
                    copies.add(bucket.nbytes, bucket.unpacked_ns - bucket.waited_ns)
                if bucket.launched_ns is not None and bucket.launch_end_ns is not None:
                    launches_ns.append(bucket.launch_end_ns - bucket.launched_ns)
    link = wires.link
    if link is None:
        return None
    fitted_ns, recorded_ns = 0.0, 0
    for rank in typical.ranks:
        for bucket in rank.buckets:
            if wire := typical.on_the_wire(bucket.index, rank):
                fitted_ns += 1e9 * link.seconds(bucket.nbytes)
                recorded_ns += wire.length_ns
    ratio = max(1e-6, recorded_ns / fitted_ns) if fitted_ns else 1.0
    return Costs(
        replace(link, latency_s=link.latency_s * ratio, bytes_per_s=link.bytes_per_s / ratio),
        sum(map(len, wires.values())),
        packs.link or FREE,
        copies.link or FREE,
        statistics.median(launches_ns or [0]),
    )


class _Samples(dict[int, list[float]]):
    """Seconds by number of bytes."""

    def add(self, nbytes: int, ns: int) -> None:
        if nbytes and ns > 0:
            self.setdefault(nbytes, []).append(ns / 1e9)

    @property
    def link(self) -> Link | None:
        """The link that best explains the median time of each size. Similar sizes show no latency: then it is 0."""
        medians = {nbytes: statistics.median(times) for nbytes, times in self.items()}
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
    longer_ns = costs.launch_ns * (len(plan.buckets) - len(step.plan.buckets))
    launches = [list(_launches_ns(rank, costs, plan, longer_ns)) for rank in step.ranks]
    ends_ns = [rank.gradients_complete_ns + longer_ns for rank in step.ranks]
    messages = []
    for bucket, times_ns in zip(plan.buckets, zip(*launches, strict=True), strict=True):
        joined_ns = max(step.joins_ns(times_ns, ends_ns))
        messages.append(Message(bucket.nbytes, (joined_ns - step.begin_ns) / 1e9))
    now_ns = max(ends_ns)
    for bucket, transfer in zip(plan.buckets, simulate(messages, costs.wire), strict=True):
        now_ns = max(now_ns, step.begin_ns + 1e9 * transfer.end_s) + 1e9 * costs.copy.seconds(bucket.nbytes)
    return now_ns


def with_earlier(step: RecordedStep, by_ns: Sequence[float]) -> RecordedStep:
    """The step with the gradients of each rank earlier by so much."""
    ranks = tuple(
        replace(
            rank,
            ready_ns={param: round(t_ns - ns) for param, t_ns in rank.ready_ns.items()},
            gradients_complete_ns=round(rank.gradients_complete_ns - ns),
        )
        for rank, ns in zip(step.ranks, by_ns, strict=True)
    )
    return replace(step, ranks=ranks)


def _launches_ns(rank: RankStep, costs: Costs, plan: BucketPlan, longer_ns: float) -> Iterator[float]:
    """The launch of each bucket, in a backward that is `longer_ns` longer; without gradients it is the end."""
    complete_ns = rank.gradients_complete_ns + longer_ns
    now_ns = 0.0
    for bucket in plan.buckets:
        ready = [t_ns for slot in bucket.slots if (t_ns := rank.ready_ns.get(slot.param)) is not None]
        packed_ns = complete_ns
        if ready:
            place = (max(ready) - rank.backward.begin_ns) / max(1, rank.backward.length_ns)
            packed_ns = max(ready) + longer_ns * place + 1e9 * costs.pack.seconds(bucket.nbytes)
        now_ns = max(now_ns, min(packed_ns, complete_ns))
        yield now_ns
