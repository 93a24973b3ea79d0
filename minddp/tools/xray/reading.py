"""From events to a timeline: the activities of a rank, and the history of each bucket. Pure.

events  ->  parts  ->  spans that tile the step   (forward, loss, backward, exposed, ...)
                       a history per bucket       (last gradient, ready, launched, completed, waited, unpacked)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.tools.xray.recording import MODULE, RankRecording, Recording, Stamped
from minddp.tools.xray.timeline import OF_MODULES, Activity, BucketHistory, Interval, Pass, RankStep, Span, Step


def steps_of(recording: Recording) -> tuple[Step, ...]:
    """All steps in which at least one synchronised backward began, in order, on the first rank's clock.

    A step has the ranks that have recorded it; incomplete ones only at the end of what was recorded. Where there
    are several modules, ranks are left out that have run other backwards than the first.
    """
    by_number: dict[int, list[RankStep]] = {}
    for rank in recording.ranks:
        for step in steps_of_rank(rank.on_the_clock_of_the_first_rank()):
            same = by_number.setdefault(step.number, [])
            if not (step.passes and same and step.plan.buckets != same[0].plan.buckets):
                same.append(step)
    adds_after_ns = recording.ranks[0].adds_after_ns
    return tuple(
        Step(number, tuple(by_number[number]), recording.world_size, adds_after_ns) for number in sorted(by_number)
    )


def steps_of_rank(recording: RankRecording) -> list[RankStep]:
    return [_read(recording, number, part) for number, part in enumerate(_split(recording), recording.first_step)]


# ---------------------------------------------------------------------- where a step begins and ends


@dataclass
class Part:
    """The events of one step, and where it ends; it is `complete` with the end of a synchronised backward."""

    events: list[Stamped] = field(default_factory=list)
    end_ns: int = 0
    complete: bool = False
    ended: set[int] = field(default_factory=set)  # modules whose synchronised backward has ended
    has_stepped: bool = False  # an optimizer

    def add(self, event: Stamped) -> None:
        self.events.append(event)
        if event.kind is EventKind.BACKWARD_END:
            self.ended.add(event.module)
        self.has_stepped |= event.kind is EventKind.OPTIMIZER_END


_SIGNS_OF_A_STEP = (EventKind.BACKWARD_BEGIN, EventKind.GRADIENT_KEPT, EventKind.ERROR)
_OF_A_BACKWARD = (EventKind.BUCKET_LAUNCHED, EventKind.COMM_HOOK_RETURNED, EventKind.BUCKET_COMPLETED)


def _split(recording: RankRecording) -> Iterator[Part]:
    """A step begins with each forward that follows the end of a synchronised backward.

    Where there are several modules, it follows one of each that trains, and an optimizer's step. See
    [Note: several modules].
    """
    training = {event.module for event in recording.events if event.kind is EventKind.BACKWARD_END}
    steps = any(event.kind is EventKind.OPTIMIZER_END for event in recording.events) and len(training) > 1
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
        part.add(event)
        part.complete = bool(part.ended) and part.ended >= training and (part.has_stepped or not steps)
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


# ---------------------------------------------------------------------- of several modules


Owned = tuple[Stamped, str]  # an event and the name of its module, empty where there is one
_OF_PARAMS = (EventKind.PARAM_READY, EventKind.GRADIENT_KEPT)
_OF_BUCKETS = (
    *(EventKind.PACK_BEGIN, EventKind.PACK_END, EventKind.BUCKET_READY, EventKind.BUCKET_WAITED),
    *(EventKind.BUCKET_UNPACKED, *_OF_A_BACKWARD),
)


def _of_several(
    recording: RankRecording, events: Sequence[Stamped]
) -> tuple[list[Owned], BucketPlan, tuple[Pass, ...]]:
    """The events, with parameters and buckets numbered through all backwards of the step, and one plan for all."""
    pieces = [
        (module, piece)
        for module, name in enumerate(recording.modules)
        for piece in _pieces([event.moved(-module * MODULE) for event in events if event.module == module])
    ]
    owned: list[Owned] = []
    specs: list[ParamSpec] = []
    groups: list[list[int]] = []
    passes: list[Pass] = []
    for module, piece in sorted(pieces, key=lambda numbered: _backward_ns(numbered[1])):
        name, plan, first = recording.modules[module], recording.plan_at(_backward_ns(piece), module), len(groups)
        by = {**dict.fromkeys(_OF_PARAMS, len(specs)), **dict.fromkeys(_OF_BUCKETS, first)}
        owned += [(event.moved(by.get(event.kind, 0)), name) for event in _with_waits(piece)]
        ends = [event.t_ns for event in piece if event.kind is EventKind.GRADIENTS_COMPLETE]
        if any(event.kind is EventKind.BUCKET_LAUNCHED for event in piece):
            groups += [[len(specs) + slot.param for slot in bucket.slots] for bucket in plan.buckets]
            specs += [replace(spec, name=f"{name}: {spec.name}") for spec in plan.params]
            passes.append(Pass(name, range(first, len(groups)), ends[-1] if ends else None))
    owned.sort(key=lambda one: (one[0].t_ns, _AT_ONE_TIME.get(one[0].kind, 0)))
    return owned, plan_from_groups(specs, groups, "each module's own plan"), tuple(passes)


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
    """When its backward begins; if it does not, the time of the last event."""
    return next((event.t_ns for event in events if event.kind is EventKind.BACKWARD_BEGIN), events[-1].t_ns)


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


def _read(recording: RankRecording, number: int, part: Part) -> RankStep:
    begin_ns = part.events[0].t_ns
    if recording.modules:
        owned, plan, passes = _of_several(recording, part.events)
    else:
        owned, passes = [(event, "") for event in _with_waits(part.events)], ()
        plan = recording.plan_at(_backward_ns(part.events))  # a rebuild within forward decides it
    events = [event for event, _ in owned]
    spans = tuple(span for span in _tile(owned, part.end_ns) if span.length_ns)
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
        passes=passes,
        peak_bytes=recording.peak_bytes,
        launch_ns=recording.launch_ns,
        crowded_ns=recording.crowded_ns,
    )


def _tile(owned: Sequence[Owned], end_ns: int) -> Iterator[Span]:
    """Spans without gap or overlap from the first event to the end of the step; some may have no length."""
    activity, since_ns, last_kept_ns = Activity.FORWARD, owned[0][0].t_ns, None
    owner, before_data = owned[0][1], Activity.OTHER
    for (t_ns, kind, subject), module in owned:
        if kind is EventKind.GRADIENT_KEPT:
            last_kept_ns = t_ns
        begins = before_data if kind is EventKind.DATA_END else _BEGINS.get(kind)
        if kind is EventKind.DATA_BEGIN:
            before_data = activity
        if begins is None or (begins is activity and module == owner):
            continue
        if last_kept_ns is not None and activity is Activity.BACKWARD:
            # A local backward has no event at its end: its last gradient is the last that is known of it.
            yield Span(activity, since_ns, last_kept_ns, module=owner)
            activity, since_ns, last_kept_ns = Activity.OTHER, last_kept_ns, None
        about = subject if kind is EventKind.BUCKET_WAITED or activity is Activity.COPY_BACK else -1
        yield Span(activity, since_ns, t_ns, about, owner if activity in OF_MODULES else "")
        activity, since_ns, owner = begins, t_ns, module
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
