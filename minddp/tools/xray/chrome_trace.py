"""A recording as trace events, for ui.perfetto.dev and chrome://tracing. Pure.

Each rank is a process. Its thread shows activities as slices and gradients as instants. Each bucket has a row of
its own, from its launch to its arrival, with the causes that delay it (see `timeline.py`). An arrow leads from the
launch of a bucket to the slice in which its rank continues with the average.

Format: "Trace Event Format", Google. Times are microseconds since the first step, on the clock of the first rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from minddp.tools.xray import words
from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.timeline import RankStep, RecordedStep

Json = dict[str, Any]
APART = 2**16  # process numbers of one recording and those of the next one


def trace_events(analyses: Sequence[Analysis]) -> list[Json]:
    """Several recordings are several groups of processes."""
    events = []
    arrows = itertools.count(1)  # Perfetto draws no arrow whose id is not a number
    titles = words.names([analysis.recording for analysis in analyses])
    for place, (analysis, title) in enumerate(zip(analyses, titles, strict=True)):
        first_pid = place * APART + 1  # 0 is the idle process of a system
        begin_ns = min(each.begin_ns for each in analysis.steps)
        for number in [rank.rank for rank in analysis.recording.ranks]:
            name = f"{title}, rank {number}" if len(analyses) > 1 else f"rank {number}"
            for kind, text in (("process_name", name), ("thread_name", "computes")):
                events.append(
                    {"ph": "M", "name": kind, "pid": first_pid + number, "tid": 1, "args": {"name": text}}
                )
        for step in analysis.steps:
            for rank in step.ranks:
                where = {"pid": first_pid + rank.rank, "tid": 1}
                for t_ns, event in _of_rank(step, rank, arrows):
                    events.append({"ts": (t_ns - begin_ns) / 1e3, **where, **event})
    return events


def _of_rank(step: RecordedStep, rank: RankStep, arrows: Iterator[int]) -> Iterator[tuple[int, Json]]:
    """The begin of each event, and the rest of it. A slice precedes the events within it."""
    for name, spans in ((None, rank.spans), ("pack", rank.packs)):
        for span in spans:
            about = {"step": step.number, "bucket": span.bucket, "module": span.module}
            args = {key: value for key, value in about.items() if value not in (-1, "")}
            slice_ = {"ph": "X", "name": name or span.activity.value, "dur": span.length_ns / 1e3, "args": args}
            yield span.begin_ns, slice_
    for param, t_ns in rank.ready_ns.items():
        yield t_ns, {"ph": "i", "name": rank.plan.params[param].name}
    for bucket in rank.buckets:
        passage = step.passage(bucket.index, rank)
        if passage is None:
            continue
        row = {"cat": "bucket", "id2": {"local": str(bucket.index)}}
        args = {"step": step.number, "bytes": bucket.nbytes, "parameters": rank.plan.names(bucket.index)}
        name, end_ns = f"bucket {bucket.index}", (passage.wire or passage.waits_for_ranks).end_ns
        yield passage.queues.begin_ns, {"ph": "b", "name": name, **row, "args": args}
        for cause, part in zip(("queues", "waits for ranks", "on the wire"), passage, strict=True):
            if part is not None and part.length_ns:
                yield part.begin_ns, {"ph": "b", "name": cause, **row}
                yield part.end_ns, {"ph": "e", "name": cause, **row}
        yield end_ns, {"ph": "e", "name": name, **row}
        if bucket.waited_ns is not None:
            arrow = {"cat": "launch", "name": name, "id": next(arrows)}
            yield passage.queues.begin_ns, {"ph": "s", **arrow}
            yield bucket.waited_ns, {"ph": "f", "bp": "e", **arrow}
