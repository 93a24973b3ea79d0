"""A Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing. Pure.

A process per rank, with a track for its activities and one for its buckets. A bucket's slice begins when the wire
is free for it, lasts until it has arrived and holds another, the time on the wire; an arrow leads to it from the
bucket's last gradient. The recording itself lies beside the events, so that the file can be loaded again.

Format: "Trace Event Format", Google, 2016. Times in it are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from minddp.xray import words
from minddp.xray.analysis import Analysis
from minddp.xray.timeline import BucketHistory, Interval, Passage, RankStep, Step

COMPUTES, BUCKETS = 1, 2  # the tracks of a process
RECORDINGS = "minddp"  # under this key
Event = dict[str, Any]


def chrome_trace(analyses: Sequence[Analysis]) -> dict[str, Any]:
    """The whole file; several recordings are as many groups of processes."""
    names: list[Event] = []
    events: list[Event] = []
    titles = words.names([analysis.recording for analysis in analyses])
    for place, (analysis, title) in enumerate(zip(analyses, titles, strict=True)):
        begin_ns = min((step.begin_ns for step in analysis.steps), default=0)
        for number in sorted({rank.rank for step in analysis.steps for rank in step.ranks}):
            process = _Process(1000 * place + number, begin_ns)
            names += process.names(f"{title}, rank {number}" if len(analyses) > 1 else f"rank {number}")
            for step in analysis.steps:
                for rank in (rank for rank in step.ranks if rank.rank == number):
                    events += process.step(step, rank)
    recordings = [analysis.recording.to_dict() for analysis in analyses]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events], RECORDINGS: recordings}


class _Process:
    """One rank, as a process of the trace."""

    def __init__(self, pid: int, begin_ns: int):
        self.pid, self._begin_ns = pid, begin_ns

    def names(self, name: str) -> Iterator[Event]:
        yield {"ph": "M", "pid": self.pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        for tid, track in ((COMPUTES, "computes"), (BUCKETS, "buckets")):
            yield {"ph": "M", "pid": self.pid, "tid": tid, "name": "thread_name", "args": {"name": track}}

    def step(self, step: Step, rank: RankStep) -> Iterator[Event]:
        for span in rank.spans:
            about = {"bucket": span.bucket} if span.bucket >= 0 else {}
            yield self._slice(COMPUTES, span.activity.value, span.interval, {"step": step.number, **about})
        for pack in rank.packs:
            yield self._slice(COMPUTES, "pack", pack.interval, {"bucket": pack.bucket})
        for param, t_ns in rank.ready_ns.items():
            yield self._event("i", COMPUTES, rank.plan.params[param].name, t_ns, s="t", cat="gradient ready")
        for bucket in rank.buckets:
            passage = step.passage(bucket.index, rank)
            if passage is not None:
                yield from self._bucket(step, rank, bucket, passage)

    def _bucket(self, step: Step, rank: RankStep, bucket: BucketHistory, passage: Passage) -> Iterator[Event]:
        wire = passage.wire
        slice_ = Interval(passage.waits_for_ranks.begin_ns, (wire or passage.waits_for_ranks).end_ns)
        seconds = (wire or slice_).length_ns / 1e9
        details = {
            "parameters": rank.plan.names(bucket.index),
            "bytes": bucket.nbytes,
            "MiB per second": round(bucket.nbytes / 2**20 / seconds, 1) if seconds else None,
            "held for ms": bucket.held_ns / 1e6,
            "queues for ms": passage.queues.length_ns / 1e6,
            "hidden ms": (rank.hidden_ns(wire) if wire else 0) / 1e6,
            "rank stands still for ms": bucket.awaited_ns / 1e6,
        }
        yield self._slice(BUCKETS, f"bucket {bucket.index}", slice_, details)
        if wire:
            yield self._slice(BUCKETS, "on the wire", wire, {})
        if bucket.fills is not None:
            arrow = {"id": f"{self.pid}.{step.number}.{bucket.index}", "cat": "bucket"}
            yield self._event("s", COMPUTES, "last gradient", bucket.fills.end_ns, **arrow)
            yield self._event("f", BUCKETS, "last gradient", slice_.begin_ns, bp="e", **arrow)

    def _slice(self, tid: int, name: str, interval: Interval, args: dict[str, Any]) -> Event:
        return self._event("X", tid, name, interval.begin_ns, dur=interval.length_ns / 1e3, args=args)

    def _event(self, phase: str, tid: int, name: str, t_ns: int, **more: Any) -> Event:
        return {"ph": phase, "pid": self.pid, "tid": tid, "name": name, "ts": (t_ns - self._begin_ns) / 1e3, **more}
