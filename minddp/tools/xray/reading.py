"""From events to steps: the spans of a rank, and the history of each bucket. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from minddp.core.events import EventKind
from minddp.tools.xray.recording import RankRecording, Recording, Stamped
from minddp.tools.xray.timeline import Activity, BucketHistory, Interval, RankStep, RecordedStep, Span


def steps_of(recording: Recording) -> tuple[RecordedStep, ...]:
    """The steps of a recording, in order, each with the ranks that recorded it. See `steps_of_rank`."""
    by_number: dict[int, list[RankStep]] = {}
    for rank in recording.ranks:
        for step in steps_of_rank(rank):
            by_number.setdefault(step.number, []).append(step)
    adds_after_ns = recording.ranks[0].adds_after_ns
    return tuple(
        RecordedStep(number, tuple(ranks), recording.world_size, adds_after_ns)
        for number, ranks in sorted(by_number.items())
    )


def steps_of_rank(recording: RankRecording) -> list[RankStep]:
    """The whole steps with the last bucket plan; earlier ones are left out.

    A step begins with each forward that follows a synchronised backward, and is whole if its own synchronised
    backward has ended.
    """
    rebuilt_ns = max((e.t_ns for e in recording.events if e.kind is EventKind.BUCKETS_REBUILT), default=0)
    return [
        _read(recording, number, events, end_ns)
        for number, (events, end_ns) in enumerate(_split(recording), recording.first_step)
        if end_ns > rebuilt_ns
    ]


_COLLECTIVES = (EventKind.BUCKET_LAUNCHED, EventKind.COMM_HOOK_RETURNED, EventKind.BUCKET_COMPLETED)


def _split(recording: RankRecording) -> Iterator[tuple[list[Stamped], int]]:
    """The events of each whole step, and its end. An error discards the step in which it occurs."""
    events: list[Stamped] = []
    kinds: set[EventKind] = set()
    whole = False
    for event in recording.events:
        if event.kind is EventKind.FORWARD_BEGIN and (whole or not events):
            if whole:
                yield events, event.t_ns
            events, kinds, whole = [event], set(), False
        elif event.kind is EventKind.ERROR:
            events, kinds, whole = [], set(), False
        elif events and not (whole and event.kind in _COLLECTIVES):  # those after backward are of `join.py`
            events.append(event)
            whole = whole or (event.kind is EventKind.BACKWARD_END and EventKind.GRADIENTS_COMPLETE in kinds)
            kinds.add(event.kind)
    if whole:
        yield events, recording.stopped_ns


# ---------------------------------------------------------------------- what happened in a step

_BEGINS = {
    EventKind.FORWARD_BEGIN: Activity.FORWARD,
    EventKind.BUFFERS_BEGIN: Activity.BUFFERS,
    EventKind.BUFFERS_BROADCAST: Activity.FORWARD,
    EventKind.FORWARD_END: Activity.LOSS,
    EventKind.BACKWARD_BEGIN: Activity.BACKWARD,
    EventKind.GRADIENT_KEPT: Activity.BACKWARD,
    EventKind.GRADIENTS_COMPLETE: Activity.EXPOSED,
    EventKind.BUCKET_WAITED: Activity.COPY_BACK,
    EventKind.BUCKET_UNPACKED: Activity.EXPOSED,
    EventKind.BACKWARD_END: Activity.OTHER,
    EventKind.OPTIMIZER_BEGIN: Activity.OPTIMIZER,
    EventKind.OPTIMIZER_END: Activity.OTHER,
}


def _read(recording: RankRecording, number: int, seen: list[Stamped], end_ns: int) -> RankStep:
    events = _with_waits(seen)
    spans = tuple(span for span in _tile(events, end_ns) if span.length_ns)
    when = {(event.kind, event.subject): event.t_ns for event in events}
    return RankStep(
        rank=recording.rank,
        number=number,
        interval=Interval(events[0].t_ns, end_ns),
        spans=spans,
        packs=tuple(_packs(events)),
        ready_ns={event.subject: event.t_ns for event in events if event.kind is EventKind.PARAM_READY},
        gradients_complete_ns=_last_gradient_ns(events),
        buckets=tuple(_histories(recording, when, spans)),
        plan=recording.plan,
    )


def _last_gradient_ns(events: list[Stamped]) -> int:
    return max(event.t_ns for event in events if event.kind is EventKind.GRADIENTS_COMPLETE)


def _with_waits(events: list[Stamped]) -> list[Stamped]:
    """Add the waits of a wrapper that does not report them: in order, each until its bucket is complete.

    The rest of backward after the last wait counts as copying back.
    """
    when = {(event.kind, event.subject): event.t_ns for event in events}
    now_ns = _last_gradient_ns(events)
    completed = sorted((b, t_ns) for (kind, b), t_ns in when.items() if kind is EventKind.BUCKET_COMPLETED)
    if not completed or any(kind is EventKind.BUCKET_WAITED for kind, _ in when):
        return events
    end = max(place for place, event in enumerate(events) if event.kind is EventKind.BACKWARD_END)
    added = []
    for bucket, completed_ns in completed:
        now_ns = max(now_ns, completed_ns)
        added += [Stamped(now_ns, kind, bucket) for kind in (EventKind.BUCKET_WAITED, EventKind.BUCKET_UNPACKED)]
    return sorted([*events[:end], *added[:-1], *events[end:]], key=lambda event: event.t_ns)


def _tile(events: Sequence[Stamped], end_ns: int) -> Iterator[Span]:
    """Spans without gap or overlap from the first event to the end of the step; some may have no length."""
    activity, since_ns, last_kept_ns = Activity.FORWARD, events[0].t_ns, None
    for event in events:
        if event.kind is EventKind.GRADIENT_KEPT:
            last_kept_ns = event.t_ns
        begins = _BEGINS.get(event.kind)
        if begins is None or begins is activity:
            continue
        if last_kept_ns is not None and activity is Activity.BACKWARD:
            # A local backward has no event at its end, so it ends with its last gradient.
            yield Span(activity, since_ns, last_kept_ns)
            activity, since_ns, last_kept_ns = Activity.OTHER, last_kept_ns, None
        has_bucket = event.kind is EventKind.BUCKET_WAITED or activity is Activity.COPY_BACK
        yield Span(activity, since_ns, event.t_ns, event.subject if has_bucket else -1)
        activity, since_ns = begins, event.t_ns
    yield Span(activity, since_ns, end_ns)


def _packs(events: Sequence[Stamped]) -> Iterator[Span]:
    since_ns = 0
    for event in events:
        if event.kind is EventKind.PACK_BEGIN:
            since_ns = event.t_ns
        elif event.kind is EventKind.PACK_END:
            yield Span(Activity.BACKWARD, since_ns, event.t_ns, event.subject)


def _histories(
    recording: RankRecording, when: Mapping[tuple[EventKind, int], int], spans: Sequence[Span]
) -> Iterator[BucketHistory]:
    for index, bucket in enumerate(recording.plan.buckets):
        params = [slot.param for slot in bucket.slots if (EventKind.PARAM_READY, slot.param) in when]
        last = max(params, key=lambda param: (when[EventKind.PARAM_READY, param], param), default=None)
        waited_ns = when.get((EventKind.BUCKET_WAITED, index))
        yield BucketHistory(
            index=index,
            nbytes=bucket.nbytes,
            last_param=last,
            launched_ns=when.get((EventKind.BUCKET_LAUNCHED, index)),
            completed_ns=when.get((EventKind.BUCKET_COMPLETED, index), waited_ns),
            waited_ns=waited_ns,
            unpacked_ns=when.get((EventKind.BUCKET_UNPACKED, index)),
            awaited_ns=sum(s.length_ns for s in spans if s.activity is Activity.EXPOSED and s.bucket == index),
            completion_was_seen=(EventKind.BUCKET_COMPLETED, index) in when,
        )
