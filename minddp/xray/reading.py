"""From events to a timeline: what a rank did when, and the history of each bucket. Pure.

events  ->  parts  ->  spans that tile the step   (forward, loss, backward, exposed, ...)
                       a history per bucket       (last gradient, ready, launched, completed, waited, unpacked)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minddp.core.events import EventKind
from minddp.xray.cut import Part, parts_of
from minddp.xray.intervals import Interval
from minddp.xray.recording import Layout, RankRecording, Recording, Stamped
from minddp.xray.timeline import Activity, BucketHistory, RankStep, Span, Step


def steps_of(recording: Recording) -> tuple[Step, ...]:
    """All steps in which at least one synchronised backward began, in order, on the first rank's clock.

    A step is there for the ranks that have recorded it; incomplete ones only at the end of what was recorded.
    """
    by_number: dict[int, list[RankStep]] = {}
    for rank in recording.ranks:
        for step in steps_of_rank(rank.on_the_clock_of_the_first_rank()):
            by_number.setdefault(step.number, []).append(step)
    return tuple(Step(number, tuple(by_number[number]), recording.world_size) for number in sorted(by_number))


def steps_of_rank(recording: RankRecording) -> list[RankStep]:
    """The steps of one rank, on its own clock."""
    return [_read(recording, number, part) for number, part in enumerate(parts_of(recording), recording.first_step)]


_BEGINS = {
    EventKind.FORWARD_BEGIN: Activity.FORWARD,
    EventKind.BUFFERS_BEGIN: Activity.BUFFERS,
    EventKind.BUFFERS_BROADCAST: Activity.FORWARD,
    EventKind.REBUILD_BEGIN: Activity.REBUILD,
    EventKind.BUCKETS_REBUILT: Activity.FORWARD,
    EventKind.FORWARD_END: Activity.LOSS,
    EventKind.BACKWARD_BEGIN: Activity.BACKWARD,
    EventKind.GRADIENT_KEPT: Activity.BACKWARD,
    EventKind.GRADIENTS_COMPLETE: Activity.EXPOSED,
    EventKind.USAGE_EXCHANGED: Activity.EXPOSED,
    EventKind.BUCKET_WAITED: Activity.COPY_BACK,
    EventKind.BUCKET_UNPACKED: Activity.EXPOSED,
    EventKind.BACKWARD_END: Activity.OTHER,
    EventKind.OPTIMIZER_BEGIN: Activity.OPTIMIZER,
    EventKind.OPTIMIZER_END: Activity.OTHER,
    EventKind.ERROR: Activity.OTHER,
}


def _read(recording: RankRecording, number: int, part: Part) -> RankStep:
    begin_ns = part.events[0].t_ns
    # A rebuild within the first forward decides the layout of this very step.
    layout = recording.layout_at(
        next((t for t, kind, _ in part.events if kind is EventKind.BACKWARD_BEGIN), begin_ns)
    )
    spans = tuple(_tile(part))
    return RankStep(
        rank=recording.rank,
        number=number,
        interval=Interval(begin_ns, part.end_ns),
        spans=spans,
        packs=tuple(_packs(part.events)),
        ready_ns={subject: t for t, kind, subject in part.events if kind is EventKind.PARAM_READY},
        buckets=tuple(_histories(part.events, layout, spans)),
        layout=layout,
        complete=part.complete,
    )


def _tile(part: Part) -> Iterator[Span]:
    """Spans without gap or overlap from the first event to the end of the part."""
    activity, since_ns, last_kept_ns = Activity.FORWARD, part.events[0].t_ns, None
    for t_ns, kind, subject in part.events:
        if kind is EventKind.GRADIENT_KEPT:
            last_kept_ns = t_ns
        begins = _BEGINS.get(kind)
        if begins is None or begins is activity:
            continue
        if last_kept_ns is not None and activity is Activity.BACKWARD:
            # Nobody is called at the end of a local backward: its last gradient is the last that is known of it.
            yield from _span(activity, since_ns, last_kept_ns)
            activity, since_ns, last_kept_ns = Activity.OTHER, last_kept_ns, None
        about = subject if kind is EventKind.BUCKET_WAITED or activity is Activity.COPY_BACK else -1
        yield from _span(activity, since_ns, t_ns, about)
        activity, since_ns = begins, t_ns
    yield from _span(activity, since_ns, part.end_ns)


def _span(activity: Activity, begin_ns: int, end_ns: int, bucket: int = -1) -> Iterator[Span]:
    if end_ns > begin_ns:
        yield Span(activity, begin_ns, end_ns, bucket)


def _packs(events: Sequence[Stamped]) -> Iterator[Span]:
    since_ns = 0
    for t_ns, kind, subject in events:
        if kind is EventKind.PACK_BEGIN:
            since_ns = t_ns
        elif kind is EventKind.PACK_END:
            yield Span(Activity.BACKWARD, since_ns, t_ns, subject)


def _histories(events: Sequence[Stamped], layout: Layout, spans: Sequence[Span]) -> Iterator[BucketHistory]:
    when = {(kind, subject): t_ns for t_ns, kind, subject in events}
    gradients_complete_ns = when.get((EventKind.GRADIENTS_COMPLETE, -1))
    for index, bucket in enumerate(layout.buckets):
        arrivals = [
            (when[EventKind.PARAM_READY, param], param)
            for param in bucket.params
            if (EventKind.PARAM_READY, param) in when
        ]
        first, last = (min(arrivals), max(arrivals)) if arrivals else ((None, None), (None, None))
        completed_ns = when.get((EventKind.BUCKET_COMPLETED, index))
        waited_ns = when.get((EventKind.BUCKET_WAITED, index))
        yield BucketHistory(
            index=index,
            nbytes=bucket.nbytes,
            first_param=first[1],
            last_param=last[1],
            first_gradient_ns=first[0],
            last_gradient_ns=last[0],
            ready_ns=when.get((EventKind.BUCKET_READY, index)),
            launched_ns=when.get((EventKind.BUCKET_LAUNCHED, index)),
            completed_ns=waited_ns if completed_ns is None else completed_ns,
            waited_ns=waited_ns,
            unpacked_ns=when.get((EventKind.BUCKET_UNPACKED, index)),
            gradients_complete_ns=gradients_complete_ns,
            awaited_ns=sum(s.length_ns for s in spans if s.activity is Activity.EXPOSED and s.bucket == index),
            completion_was_seen=completed_ns is not None,
        )
