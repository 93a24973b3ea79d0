"""From events to steps: the spans of a rank, and the history of each bucket. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.tools.xray.recording import RankRecording, Recording, Stamped
from minddp.tools.xray.timeline import (
    OF_MODULES,
    Activity,
    BucketHistory,
    Interval,
    ModuleBackward,
    RankStep,
    RecordedStep,
    Span,
)


def steps_of(recording: Recording) -> tuple[RecordedStep, ...]:
    """All steps in which at least one synchronised backward began, in order, on the first rank's clock.

    A step has the ranks that recorded it. Only the last step may be incomplete. In a step of several modules, ranks
    that ran other backwards than the first rank are left out.
    """
    by_number: dict[int, list[RankStep]] = {}
    for rank in recording.ranks:
        for step in steps_of_rank(rank.on_the_clock_of_the_first_rank()):
            same = by_number.setdefault(step.number, [])
            if not (step.has_several_modules and same and step.plan.buckets != same[0].plan.buckets):
                same.append(step)
    adds_after_ns = recording.ranks[0].adds_after_ns
    return tuple(
        RecordedStep(number, tuple(ranks), recording.world_size, adds_after_ns)
        for number, ranks in sorted(by_number.items())
    )


def steps_of_rank(recording: RankRecording) -> list[RankStep]:
    return [_read(recording, number, *part) for number, part in enumerate(_split(recording), recording.first_step)]


# ---------------------------------------------------------------------- where a step begins and ends


_SIGNS_OF_A_STEP = (EventKind.BACKWARD_BEGIN, EventKind.GRADIENT_KEPT, EventKind.ERROR)
_COLLECTIVES = (EventKind.BUCKET_LAUNCHED, EventKind.COMM_HOOK_RETURNED, EventKind.BUCKET_COMPLETED)


def _split(recording: RankRecording) -> Iterator[tuple[list[Stamped], int, bool]]:
    """The events of each step, its end, and whether it is complete.

    A step begins with each forward that follows a synchronised backward. With several modules, the forward must
    follow a backward of each module that trains, and an optimizer's step.
    """
    awaited = {event.module for event in recording.events if event.kind is EventKind.BACKWARD_END}
    if len(awaited) > 1 and any(event.kind is EventKind.OPTIMIZER_END for event in recording.events):
        awaited.add(-1)  # an optimizer's step
    events: list[Stamped] = []
    missing, complete = set(awaited), False
    for event in recording.events:
        if event.kind is EventKind.FORWARD_BEGIN and (not events or complete):
            if events:
                yield events, event.t_ns, complete
            events, missing, complete = [], set(awaited), False
        elif not events or (complete and event.kind in _COLLECTIVES):
            continue  # the recording began in the middle of a step; or these collectives are those of `join.py`
        if event.kind is EventKind.ERROR and len(events) > 1 and events[-1].kind is EventKind.FORWARD_BEGIN:
            *before, last = events  # this forward found the error of the backward before it
            yield before, last.t_ns, False
            events, missing = [last], set(awaited)
        events.append(event)
        if event.kind is EventKind.BACKWARD_END:
            missing.discard(event.module)
        elif event.kind is EventKind.OPTIMIZER_END:
            missing.discard(-1)
        complete = bool(awaited) and not missing
    if any(event.kind in _SIGNS_OF_A_STEP for event in events):
        yield events, recording.stopped_ns, complete


# ---------------------------------------------------------------------- one plan for all modules

_OF_PARAMS = (EventKind.PARAM_READY, EventKind.GRADIENT_KEPT)
_OF_BUCKETS = (
    *(EventKind.PACK_BEGIN, EventKind.PACK_END, EventKind.BUCKET_READY, EventKind.BUCKET_WAITED),
    *(EventKind.BUCKET_UNPACKED, *_COLLECTIVES),
)


def _merged(
    recording: RankRecording, events: Sequence[Stamped]
) -> tuple[list[Stamped], BucketPlan, tuple[ModuleBackward, ...]]:
    """The events with parameters and buckets numbered through all backwards of the step, and one plan for them."""
    names = recording.modules or ("",)
    pieces = [piece for module in range(len(names)) for piece in _pieces([e for e in events if e.module == module])]
    merged: list[Stamped] = []
    specs: list[ParamSpec] = []
    groups: list[list[int]] = []
    backwards: list[ModuleBackward] = []
    origin = "each module's own plan"
    for piece in sorted(pieces, key=_backward_ns):
        module, first = piece[0].module, len(groups)
        name, plan = names[module], recording.plan_at(_backward_ns(piece), module)
        by = {**dict.fromkeys(_OF_PARAMS, len(specs)), **dict.fromkeys(_OF_BUCKETS, first)}
        merged += [event._replace(subject=event.subject + by.get(event.kind, 0)) for event in _with_waits(piece)]
        if not recording.modules or any(event.kind is EventKind.BUCKET_LAUNCHED for event in piece):
            ends = [event.t_ns for event in piece if event.kind is EventKind.GRADIENTS_COMPLETE]
            groups += [[len(specs) + slot.param for slot in bucket.slots] for bucket in plan.buckets]
            specs += [replace(spec, name=f"{name}: {spec.name}") if name else spec for spec in plan.params]
            backwards.append(ModuleBackward(name, range(first, len(groups)), ends[-1] if ends else None))
    merged.sort(key=lambda event: event.t_ns)
    together = plan_from_groups(specs, groups, origin) if recording.modules else plan
    return merged, together, tuple(backwards)


def _pieces(events: Sequence[Stamped]) -> Iterator[list[Stamped]]:
    """One module's events, divided before each forward that follows a synchronised backward."""
    piece: list[Stamped] = []
    has_ended = False
    for event in events:
        if event.kind is EventKind.FORWARD_BEGIN and has_ended:
            yield piece
            piece, has_ended = [], False
        piece.append(event)
        has_ended |= event.kind is EventKind.BACKWARD_END
    if piece:
        yield piece


def _backward_ns(events: Sequence[Stamped]) -> int:
    """The begin of its backward; without one, the time of the last event."""
    return next((event.t_ns for event in events if event.kind is EventKind.BACKWARD_BEGIN), events[-1].t_ns)


def _with_waits(events: list[Stamped]) -> list[Stamped]:
    """Add the waits of a wrapper that does not report them: in order, each until its bucket is complete.

    The rest of backward after the last wait counts as copying back.
    """
    when = {(event.kind, event.subject): event.t_ns for event in events}
    now_ns = when.get((EventKind.GRADIENTS_COMPLETE, -1))
    completed = sorted((b, t_ns) for (kind, b), t_ns in when.items() if kind is EventKind.BUCKET_COMPLETED)
    if now_ns is None or not completed or any(kind is EventKind.BUCKET_WAITED for kind, _ in when):
        return events
    added = []
    for bucket, completed_ns in completed:
        now_ns = max(now_ns, completed_ns)
        kinds = (EventKind.BUCKET_WAITED, EventKind.BUCKET_UNPACKED)
        added += [Stamped(now_ns, kind, bucket, events[0].module) for kind in kinds]
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
    EventKind.DATA_BEGIN: Activity.DATA,
    EventKind.ERROR: Activity.OTHER,
}


def _read(recording: RankRecording, number: int, seen: Sequence[Stamped], end_ns: int, complete: bool) -> RankStep:
    events, plan, backwards = _merged(recording, seen)
    spans = tuple(span for span in _tile(events, end_ns, recording.modules or ("",)) if span.length_ns)
    when = {(event.kind, event.subject): event.t_ns for event in events}
    return RankStep(
        rank=recording.rank,
        number=number,
        interval=Interval(seen[0].t_ns, end_ns),
        spans=spans,
        packs=tuple(_packs(events)),
        ready_ns={event.subject: event.t_ns for event in events if event.kind is EventKind.PARAM_READY},
        gradients_complete_ns=when.get((EventKind.GRADIENTS_COMPLETE, -1)),
        buckets=tuple(_histories(when, plan, spans)),
        plan=plan,
        complete=complete,
        backwards=backwards,
        peak_bytes=recording.peak_bytes,
        launch_ns=recording.launch_ns,
        crowded_ns=recording.crowded_ns,
    )


def _tile(events: Sequence[Stamped], end_ns: int, names: Sequence[str]) -> Iterator[Span]:
    """Spans without gap or overlap from the first event to the end of the step; some may have no length."""
    activity, since_ns, module = Activity.FORWARD, events[0].t_ns, events[0].module
    before_data, last_kept_ns = Activity.OTHER, None
    for event in events:
        if event.kind is EventKind.GRADIENT_KEPT:
            last_kept_ns = event.t_ns
        begins = before_data if event.kind is EventKind.DATA_END else _BEGINS.get(event.kind)
        if event.kind is EventKind.DATA_BEGIN:
            before_data = activity
        if begins is None or (begins is activity and event.module == module):
            continue
        if last_kept_ns is not None and activity is Activity.BACKWARD:
            # A local backward has no event at its end, so it ends with its last gradient.
            yield Span(activity, since_ns, last_kept_ns, module=names[module])
            activity, since_ns, last_kept_ns = Activity.OTHER, last_kept_ns, None
        has_bucket = event.kind is EventKind.BUCKET_WAITED or activity is Activity.COPY_BACK
        name = names[module] if activity in OF_MODULES else ""
        yield Span(activity, since_ns, event.t_ns, event.subject if has_bucket else -1, name)
        activity, since_ns, module = begins, event.t_ns, event.module
    yield Span(activity, since_ns, end_ns)


def _packs(events: Sequence[Stamped]) -> Iterator[Span]:
    since_ns = 0
    for event in events:
        if event.kind is EventKind.PACK_BEGIN:
            since_ns = event.t_ns
        elif event.kind is EventKind.PACK_END:
            yield Span(Activity.BACKWARD, since_ns, event.t_ns, event.subject)


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
