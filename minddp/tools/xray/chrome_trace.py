"""A recording as trace events, for ui.perfetto.dev and chrome://tracing. Pure.

Each rank is a process. Its thread shows activities as slices and gradients as instants. Each bucket has a row of
its own, from its launch to its arrival, with the causes that delay it (see `timeline.py`).

Format: "Trace Event Format", Google. Times are microseconds since the first step, on the clock of the first rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.timeline import RankStep, RecordedStep

Json = dict[str, Any]


def trace_events(analysis: Analysis) -> list[Json]:
    """Names of ranks, then the events of each step."""
    events = []
    begin_ns = min(step.begin_ns for step in analysis.steps)
    for rank in analysis.recording.ranks:
        for kind, name in (("process_name", f"rank {rank.rank}"), ("thread_name", "computes")):
            events.append({"ph": "M", "name": kind, **_place(rank.rank), "args": {"name": name}})
    for step in analysis.steps:
        for rank_step in step.ranks:
            for t_ns, event in _of_rank(step, rank_step):
                events.append({"ts": (t_ns - begin_ns) / 1e3, **_place(rank_step.rank), **event})
    return events


def _place(rank: int) -> Json:
    return {"pid": rank + 1, "tid": 1}  # process 0 is the idle one of a system


def _of_rank(step: RecordedStep, rank: RankStep) -> Iterator[tuple[int, Json]]:
    """The begin of each event, and the rest of it. A slice precedes the events within it."""
    for name, spans in ((None, rank.spans), ("pack", rank.packs)):
        for span in spans:
            about = {"step": step.number, **({"bucket": span.bucket} if span.bucket >= 0 else {})}
            slice_ = {"ph": "X", "name": name or span.activity.value, "dur": span.length_ns / 1e3}
            yield span.begin_ns, {**slice_, "args": about}
    for param, t_ns in rank.ready_ns.items():
        yield t_ns, {"ph": "i", "name": rank.plan.params[param].name}
    for bucket in rank.buckets:
        passage = step.passage(bucket.index, rank)
        if passage is None:
            continue
        row = {"cat": "bucket", "id2": {"local": str(bucket.index)}}
        args: Json = {"step": step.number, "bytes": bucket.nbytes, "parameters": rank.plan.names(bucket.index)}
        yield passage.queues.begin_ns, {"ph": "b", "name": f"bucket {bucket.index}", **row, "args": args}
        for cause, part in zip(("queues", "waits for ranks", "on the wire"), passage, strict=True):
            if part.length_ns:
                yield part.begin_ns, {"ph": "b", "name": cause, **row}
                yield part.end_ns, {"ph": "e", "name": cause, **row}
        yield passage.wire.end_ns, {"ph": "e", "name": f"bucket {bucket.index}", **row}
