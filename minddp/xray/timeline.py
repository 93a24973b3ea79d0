"""From events to a timeline: what a rank did when, and the history of each bucket. Pure.

    events  ->  steps  ->  spans that tile the step   (forward, loss, backward, exposed, ...)
                           a history per bucket       (last gradient, ready, launched, completed, waited, unpacked)

[Note: exposed communication]
A collective runs beside backward for as long as there is a backward. What is under way when autograd has computed
its last gradient is *exposed*: the rank has nothing left to do and waits. Per step that is the time spent waiting
in launch order; a bucket's share is the time that the rank waited for just this one, so that the shares add up.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from minddp.events import EventKind
from minddp.xray.intervals import Interval, intersection, measure_ns
from minddp.xray.recording import Layout, RankRecording, Recording, Stamped


class Activity(enum.Enum):
    """What the thread that trains is doing."""

    FORWARD = "forward"
    BUFFERS = "buffers"  # rank 0's are taken over, within forward
    REBUILD = "rebuild"  # of the buckets, within forward
    LOSS = "loss"  # from the end of forward to the beginning of backward
    BACKWARD = "backward"
    EXPOSED = "exposed communication"  # see [Note: exposed communication]
    COPY_BACK = "copy back"  # averages are put where the optimizer looks
    OPTIMIZER = "optimizer"
    OTHER = "other"  # all that nobody has told about: data, zero_grad, logging


@dataclass(frozen=True)
class Span:
    """A stretch of one activity; `bucket` is the one that is waited for, copied back or packed, else -1."""

    activity: Activity
    begin_ns: int
    end_ns: int
    bucket: int = -1

    @property
    def interval(self) -> Interval:
        return Interval(self.begin_ns, self.end_ns)

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class BucketHistory:
    """One bucket in one step on one rank. A time is `None` if it did not come to that.

    `first_param` and `last_param` are those whose gradients arrived first and last. `ready_ns`: all of them are
    packed. `gradients_complete_ns`: backward has nothing left to compute. `awaited_ns`: how long the rank stood
    still for this bucket.
    """

    index: int
    nbytes: int
    first_param: int | None
    last_param: int | None
    first_gradient_ns: int | None
    last_gradient_ns: int | None
    ready_ns: int | None
    launched_ns: int | None
    completed_ns: int | None
    waited_ns: int | None
    unpacked_ns: int | None
    gradients_complete_ns: int | None
    awaited_ns: int = 0
    completion_was_seen: bool = True

    @property
    def held_ns(self) -> int:
        """How long it was ready but not launched, since a bucket before it in the plan was not ready."""
        return _between(self.ready_ns, self.launched_ns)

    def hidden_ns(self, of: Interval) -> int:
        """How much of an interval lies beside backward, rather than after it."""
        end_ns = of.end_ns if self.gradients_complete_ns is None else self.gradients_complete_ns
        return Interval(of.begin_ns, min(of.end_ns, end_ns)).length_ns


@dataclass(frozen=True)
class RankStep:
    """One step on one rank. `spans` tile it without gap or overlap; `packs` lie within backward.

    `ready_ns` gives for each parameter when its gradient arrived. A step that an error cut short, or whose
    backward the recording did not see end, is not `complete`.
    """

    rank: int
    number: int
    interval: Interval
    spans: tuple[Span, ...]
    packs: tuple[Span, ...]
    ready_ns: Mapping[int, int]
    buckets: tuple[BucketHistory, ...]
    layout: Layout
    complete: bool

    @property
    def length_ns(self) -> int:
        return self.interval.length_ns

    @cached_property
    def parts_ns(self) -> dict[Activity, int]:
        """How long each activity took; together they are the step."""
        return {
            activity: sum(span.length_ns for span in self.spans if span.activity is activity)
            for activity in Activity
        }

    @property
    def waits(self) -> list[Span]:
        """When the rank stood still for communication."""
        return [span for span in self.spans if span.activity is Activity.EXPOSED]

    @property
    def gradients_complete_ns(self) -> int | None:
        return next((b.gradients_complete_ns for b in self.buckets), None)


@dataclass(frozen=True)
class Step:
    """The same step on all the ranks that have recorded it, on one clock."""

    number: int
    ranks: tuple[RankStep, ...]
    world_size: int

    @property
    def complete(self) -> bool:
        return all(rank.complete for rank in self.ranks)

    @property
    def slowest(self) -> RankStep:
        return max(self.ranks, key=lambda rank: rank.length_ns)

    @property
    def length_ns(self) -> int:
        return self.slowest.length_ns

    @property
    def begin_ns(self) -> int:
        return min(rank.interval.begin_ns for rank in self.ranks)

    @property
    def end_ns(self) -> int:
        return max(rank.interval.end_ns for rank in self.ranks)

    @property
    def layout(self) -> Layout:
        return self.ranks[0].layout

    @property
    def sees_all_ranks(self) -> bool:
        return len(self.ranks) == self.world_size

    def histories(self, bucket: int) -> list[BucketHistory]:
        """The bucket's history on each recorded rank, in the order of `ranks`."""
        return [rank.buckets[bucket] for rank in self.ranks]

    def last_launch(self, bucket: int) -> tuple[int, int] | None:
        """When the last rank launched the bucket, and which rank that was. None if not all were recorded.

        Before that nothing can be added up: the collective waits for all.
        """
        launches = [(h.launched_ns, rank.rank) for h, rank in zip(self.histories(bucket), self.ranks, strict=True)]
        known = [(t_ns, rank) for t_ns, rank in launches if t_ns is not None]
        return max(known) if self.sees_all_ranks and len(known) == len(launches) else None

    def on_the_wire(self, bucket: int, rank: RankStep) -> Interval | None:
        """When the bucket's bytes can have been moving; None if it was not launched, or never completed.

        That is from when all ranks have launched it and those before are through, so that no two of these intervals
        overlap. Where not all ranks were recorded, waiting for the others looks like moving bytes.
        """
        history, last = rank.buckets[bucket], self.last_launch(bucket)
        if history.launched_ns is None or history.completed_ns is None:
            return None
        all_launched_ns = history.launched_ns if last is None else last[0]
        earlier = (rank.buckets[index].completed_ns or 0 for index in range(bucket))
        begin_ns = max(all_launched_ns, max(earlier, default=0))
        return Interval(min(begin_ns, history.completed_ns), history.completed_ns)  # it may overtake others

    def communication(self, rank: RankStep) -> list[Interval]:
        """When bytes were moving for one rank."""
        wires = (self.on_the_wire(bucket.index, rank) for bucket in rank.buckets)
        return [wire for wire in wires if wire is not None]

    def overlap(self, rank: RankStep) -> float:
        """The share of the communication for which the rank did not stand still; 1 if there was none."""
        wires = self.communication(rank)
        exposed_ns = measure_ns(intersection(wires, [span.interval for span in rank.waits]))
        return 1 - exposed_ns / measure_ns(wires) if measure_ns(wires) else 1.0


def steps_of(recording: Recording) -> tuple[Step, ...]:
    """All steps in which at least one synchronised backward began, in order, on the first rank's clock.

    A step is there for the ranks that have recorded it; incomplete ones only at the end of what was recorded.
    """
    by_number: dict[int, list[RankStep]] = {}
    for rank in recording.ranks:
        for step in steps_of_rank(rank.on_the_clock_of_the_first_rank()):
            by_number.setdefault(step.number, []).append(step)
    return tuple(Step(number, tuple(by_number[number]), recording.world_size) for number in sorted(by_number))


def typical(steps: Sequence[Step]) -> Step:
    """The step that stands for the others: the one of median length among those that are like most.

    Raises:
        ValueError: there is no step at all.
    """
    if not steps:
        raise ValueError(
            "No step was recorded: there must be a forward and a backward that is synchronised within the "
            "recording. Put `with minddp.xray(ddp)` around at least one whole step."
        )
    candidates = [step for step in steps if step.complete] or list(steps)
    final = [step for step in candidates if step.layout.buckets == candidates[-1].layout.buckets]
    median = statistics.median_low(step.length_ns for step in final)
    return next(step for step in final if step.length_ns == median)


def steps_of_rank(recording: RankRecording) -> list[RankStep]:
    """The steps of one rank, on its own clock."""
    parts = [replace(part, events=_with_waits(part.events)) for part in _split(recording)]
    return [_read(recording, number, part) for number, part in enumerate(parts, start=recording.first_step)]


@dataclass
class _Part:
    """The events of one step, and where it ends."""

    events: list[Stamped] = field(default_factory=list)
    end_ns: int = 0
    complete: bool = False


def _split(recording: RankRecording) -> Iterator[_Part]:
    """Cut at each forward that follows the end of a synchronised backward: what lies between is a step."""
    part: _Part | None = None
    for event in recording.events:
        if event.kind is EventKind.FORWARD_BEGIN and (part is None or part.complete):
            if part is not None:
                part.end_ns = event.t_ns
                yield part
            part = _Part()
        if part is None or (part.complete and event.kind in _OF_A_BACKWARD):
            continue  # the recording began in the middle of a step; or these collectives are a shadow's (`join.py`)
        if (
            event.kind is EventKind.ERROR
            and part.events[-1].kind is EventKind.FORWARD_BEGIN
            and len(part.events) > 1
        ):
            part, interrupted = _Part([part.events[-1]]), part  # a forward has found out about the one before
            yield _Part(interrupted.events[:-1], end_ns=part.events[0].t_ns)
        part.events.append(event)
        part.complete = part.complete or event.kind is EventKind.BACKWARD_END
    if part is not None and any(event.kind in _SIGNS_OF_A_STEP for event in part.events):
        part.end_ns = recording.stopped_ns
        yield part


def _with_waits(events: list[Stamped]) -> list[Stamped]:
    """Add the waits of a wrapper that does not tell of them: in order, each until its bucket is complete.

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
        added += [
            Stamped(now_ns, EventKind.BUCKET_WAITED, bucket),
            Stamped(now_ns, EventKind.BUCKET_UNPACKED, bucket),
        ]
    return sorted([*events, *added[:-1]], key=lambda event: (event.t_ns, _AT_ONE_TIME.get(event.kind, 0)))


# What comes after what, where an inferred time is equal to a seen one.
_AT_ONE_TIME = {
    **dict.fromkeys((EventKind.BUCKET_WAITED, EventKind.BUCKET_UNPACKED), 1),
    **dict.fromkeys((EventKind.BACKWARD_END, EventKind.OPTIMIZER_BEGIN, EventKind.OPTIMIZER_END), 2),
}
_SIGNS_OF_A_STEP = (EventKind.BACKWARD_BEGIN, EventKind.GRADIENT_KEPT, EventKind.ERROR)
_OF_A_BACKWARD = (EventKind.BUCKET_LAUNCHED, EventKind.COMM_HOOK_RETURNED, EventKind.BUCKET_COMPLETED)

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


def _read(recording: RankRecording, number: int, part: _Part) -> RankStep:
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


def _tile(part: _Part) -> Iterator[Span]:
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


def _between(begin_ns: int | None, end_ns: int | None) -> int:
    return 0 if begin_ns is None or end_ns is None else max(0, end_ns - begin_ns)
