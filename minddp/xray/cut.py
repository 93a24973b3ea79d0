"""Where a step begins and ends among the events of a rank; and what it did not tell, but can be inferred. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from minddp.core.events import EventKind
from minddp.xray.recording import RankRecording, Stamped


@dataclass
class Part:
    """The events of one step, and where it ends; it is `complete` with the end of a synchronised backward."""

    events: list[Stamped] = field(default_factory=list)
    end_ns: int = 0
    complete: bool = False


def parts_of(recording: RankRecording) -> list[Part]:
    """The parts of one rank's recording, in order, on its own clock."""
    return [replace(part, events=_with_waits(part.events)) for part in _split(recording)]


def _split(recording: RankRecording) -> Iterator[Part]:
    """Cut at each forward that follows the end of a synchronised backward: what lies between is a step."""
    part: Part | None = None
    for event in recording.events:
        if event.kind is EventKind.FORWARD_BEGIN and (part is None or part.complete):
            if part is not None:
                part.end_ns = event.t_ns
                yield part
            part = Part()
        if part is None or (part.complete and event.kind in _OF_A_BACKWARD):
            continue  # the recording began in the middle of a step; or these collectives are a shadow's (`join.py`)
        if (
            event.kind is EventKind.ERROR
            and part.events[-1].kind is EventKind.FORWARD_BEGIN
            and len(part.events) > 1
        ):
            part, interrupted = Part([part.events[-1]]), part  # a forward has found out about the one before
            yield Part(interrupted.events[:-1], end_ns=part.events[0].t_ns)
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
