"""From events to a timeline: the activities of a rank, and the history of each bucket. Pure.

events  ->  parts  ->  spans that tile the step   (forward, loss, backward, exposed, ...)
                       a history per bucket       (last gradient, ready, launched, completed, waited, unpacked)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan
from minddp.xray.recording import RankRecording, Recording, Stamped
from minddp.xray.timeline import Activity, BucketHistory, Interval, RankStep, Span, Step


def steps_of(recording: Recording) -> tuple[Step, ...]:
    """All steps in which at least one synchronised backward began, in order, on the first rank's clock.

    A step has the ranks that have recorded it; incomplete ones only at the end of what was recorded.
    """
    by_number: dict[int, list[RankStep]] = {}
    for rank in recording.ranks:
        for step in steps_of_rank(rank.on_the_clock_of_the_first_rank()):
            by_number.setdefault(step.number, []).append(step)
    return tuple(Step(number, tuple(by_number[number]), recording.world_size) for number in sorted(by_number))


def steps_of_rank(recording: RankRecording) -> list[RankStep]:
    """The steps of one rank, on its own clock."""
    return [_read(recording, number, part) for number, part in enumerate(_split(recording), recording.first_step)]


# ---------------------------------------------------------------------- where a step begins and ends


@dataclass
class Part:
    """The events of one step, and where it ends; it is `complete` with the end of a synchronised backward."""

    events: list[Stamped] = field(default_factory=list)
    end_ns: int = 0
    complete: bool = False


_SIGNS_OF_A_STEP = (EventKind.BACKWARD_BEGIN, EventKind.GRADIENT_KEPT, EventKind.ERROR)
_OF_A_BACKWARD = (EventKind.BUCKET_LAUNCHED, EventKind.COMM_HOOK_RETURNED, EventKind.BUCKET_COMPLETED)


def _split(recording: RankRecording) -> Iterator[Part]:
    """A step begins with each forward that follows the end of a synchronised backward."""
    part: Part | None = None
    for event in recording.events:
        if event.kind is EventKind.FORWARD_BEGIN and (part is None or part.complete):
            if part is not None:
                part.end_ns = event.t_ns
                yield part
            part = Part()
        if part is None or (part.complete and event.kind in _OF_A_BACKWARD):
            continue  # the recording began in the middle of a step; or these collectives are those of `join.py`
        if (
            event.kind is EventKind.ERROR
            and part.events[-1].kind is EventKind.FORWARD_BEGIN
            and len(part.events) > 1
        ):
            part, interrupted = Part([part.events[-1]]), part  # a forward has found the error of the one before
            yield Part(interrupted.events[:-1], end_ns=part.events[0].t_ns)
        part.events.append(event)
        part.complete |= event.kind is EventKind.BACKWARD_END
    if part is not None and any(event.kind in _SIGNS_OF_A_STEP for event in part.events):
        part.end_ns = recording.stopped_ns
        yield part


def _with_waits(events: list[Stamped]) -> list[Stamped]:
    """Add the waits of a wrapper that does not report them: in order, each until its bucket is complete.

    What is left of backward after the last counts as copying back.
    """
    when = {(kind, subject): t_ns for t_ns, kind, subject in events}
    now_ns = when.get((EventKind.GRADIENTS_COMPLETE, -1))
    completed = sorted((b, t_ns) for (kind, b), t_ns in when.items() if kind is EventKind.BUCKET_COMPLETED)
    if now_ns is None or not completed or any(kind is EventKind.BUCKET_WAITED for kind, _ in when):
        return events
    added = []
    for bucket, completed_ns in completed:
        now_ns = max(now_ns, completed_ns)
        added += [Stamped(now_ns, kind, bucket) for kind in (EventKind.BUCKET_WAITED, EventKind.BUCKET_UNPACKED)]
    return sorted([*events, *added[:-1]], key=lambda event: (event.t_ns, _AT_ONE_TIME.get(event.kind, 0)))


# The order of events where an inferred time is equal to a seen one.
_AT_ONE_TIME = {
    **dict.fromkeys((EventKind.BUCKET_WAITED, EventKind.BUCKET_UNPACKED), 1),
    **dict.fromkeys((EventKind.BACKWARD_END, EventKind.OPTIMIZER_BEGIN, EventKind.OPTIMIZER_END), 2),
}


# ---------------------------------------------------------------------- what happened in it

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
    events, begin_ns = _with_waits(part.events), part.events[0].t_ns
    # A rebuild within the first forward decides the plan of this very step.
    plan = recording.plan_at(next((t for t, kind, _ in events if kind is EventKind.BACKWARD_BEGIN), begin_ns))
    spans = tuple(span for span in _tile(events, part.end_ns) if span.length_ns)
    when = {(kind, subject): t_ns for t_ns, kind, subject in events}
    return RankStep(
        rank=recording.rank,
        number=number,
        interval=Interval(begin_ns, part.end_ns),
        spans=spans,
        packs=tuple(_packs(events)),
        ready_ns={subject: t for t, kind, subject in events if kind is EventKind.PARAM_READY},
        gradients_complete_ns=when.get((EventKind.GRADIENTS_COMPLETE, -1)),
        buckets=tuple(_histories(when, plan, spans)),
        plan=plan,
        complete=part.complete,
    )


def _tile(events: Sequence[Stamped], end_ns: int) -> Iterator[Span]:
    """Spans without gap or overlap from the first event to the end of the step; some may have no length."""
    activity, since_ns, last_kept_ns = Activity.FORWARD, events[0].t_ns, None
    for t_ns, kind, subject in events:
        if kind is EventKind.GRADIENT_KEPT:
            last_kept_ns = t_ns
        begins = _BEGINS.get(kind)
        if begins is None or begins is activity:
            continue
        if last_kept_ns is not None and activity is Activity.BACKWARD:
            # A local backward has no event at its end: its last gradient is the last that is known of it.
            yield Span(activity, since_ns, last_kept_ns)
            activity, since_ns, last_kept_ns = Activity.OTHER, last_kept_ns, None
        about = subject if kind is EventKind.BUCKET_WAITED or activity is Activity.COPY_BACK else -1
        yield Span(activity, since_ns, t_ns, about)
        activity, since_ns = begins, t_ns
    yield Span(activity, since_ns, end_ns)


def _packs(events: Sequence[Stamped]) -> Iterator[Span]:
    since_ns = 0
    for t_ns, kind, subject in events:
        if kind is EventKind.PACK_BEGIN:
            since_ns = t_ns
        elif kind is EventKind.PACK_END:
            yield Span(Activity.BACKWARD, since_ns, t_ns, subject)


def _histories(
    when: Mapping[tuple[EventKind, int], int], plan: BucketPlan, spans: Sequence[Span]
) -> Iterator[BucketHistory]:
    for index, bucket in enumerate(plan.buckets):
        ready = [(when.get((EventKind.PARAM_READY, slot.param)), slot.param) for slot in bucket.slots]
        arrivals = [(t_ns, param) for t_ns, param in ready if t_ns is not None]
        completed_ns = when.get((EventKind.BUCKET_COMPLETED, index))
        waited_ns = when.get((EventKind.BUCKET_WAITED, index))
        yield BucketHistory(
            index=index,
            nbytes=bucket.nbytes,
            fills=Interval(min(arrivals)[0], max(arrivals)[0]) if arrivals else None,
            last_param=max(arrivals)[1] if arrivals else None,
            ready_ns=when.get((EventKind.BUCKET_READY, index)),
            launched_ns=when.get((EventKind.BUCKET_LAUNCHED, index)),
            completed_ns=waited_ns if completed_ns is None else completed_ns,
            waited_ns=waited_ns,
            unpacked_ns=when.get((EventKind.BUCKET_UNPACKED, index)),
            awaited_ns=sum(s.length_ns for s in spans if s.activity is Activity.EXPOSED and s.bucket == index),
            completion_was_seen=completed_ns is not None,
        )
