"""A Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing. Pure.

A process per rank, with a track for its activities and one for its buckets. A bucket's slice lasts from its
launch to its completion and holds another, the time on the wire; an arrow leads to it from the bucket's last
gradient. Buckets that are under way at the same time have tracks of their own. The recording itself lies beside
the events, so that the file can be loaded again.

Format: "Trace Event Format", Google, 2016. Times in it are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from minddp.xray import words
from minddp.xray.analysis import Analysis
from minddp.xray.intervals import Interval
from minddp.xray.timeline import BucketHistory, RankStep, Step

COMPUTES = 1  # the track of a process; those of its buckets follow
RECORDINGS = "minddp"  # under this key
Event = dict[str, Any]


def chrome_trace(analyses: Sequence[Analysis]) -> dict[str, Any]:
    """The whole file; several recordings are as many groups of processes."""
    events: list[Event] = []
    names_of_recordings = words.names([analysis.recording for analysis in analyses])
    for place, (analysis, name) in enumerate(zip(analyses, names_of_recordings, strict=True)):
        title = f"{name}, " if len(analyses) > 1 else ""
        begin_ns = min((step.begin_ns for step in analysis.steps), default=0)
        for step in analysis.steps:
            for rank in step.ranks:
                process = _Process(1000 * place + rank.rank, f"{title}rank {rank.rank}", begin_ns)
                events += process.step(step, rank)
    names = {(e["pid"], e["tid"], e["name"]): e for e in events if e["ph"] == "M"}
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [*names.values(), *(event for event in events if event["ph"] != "M")],
        RECORDINGS: [analysis.recording.to_dict() for analysis in analyses],
    }


class _Process:
    """One rank, as a process of the trace."""

    def __init__(self, pid: int, name: str, begin_ns: int):
        self.pid, self.name, self._begin_ns = pid, name, begin_ns

    def step(self, step: Step, rank: RankStep) -> Iterator[Event]:
        yield from self._named("process_name", 0, self.name)
        yield from self._named("thread_name", COMPUTES, "computes")
        for span in rank.spans:
            about = {"bucket": span.bucket} if span.bucket >= 0 else {}
            yield self._slice(COMPUTES, span.activity.value, span.interval, {"step": step.number, **about})
        for pack in rank.packs:
            yield self._slice(COMPUTES, "pack", pack.interval, {"bucket": pack.bucket})
        for param, t_ns in rank.ready_ns.items():
            yield self._event("i", COMPUTES, rank.layout.params[param].name, t_ns, s="t", cat="gradient ready")
        flights = {bucket.index: flight for bucket in rank.buckets if (flight := _flight(bucket, rank))}
        for index, lane in zip(flights, lanes(flights.values()), strict=True):
            tid = COMPUTES + 1 + lane
            yield from self._named("thread_name", tid, "buckets" if lane == 0 else f"buckets {lane + 1}")
            yield from self._bucket(step, rank, rank.buckets[index], flights[index], tid)

    def _bucket(
        self, step: Step, rank: RankStep, bucket: BucketHistory, flight: Interval, tid: int
    ) -> Iterator[Event]:
        wire = step.on_the_wire(bucket.index, rank)
        seconds = (wire.length_ns if wire else flight.length_ns) / 1e9
        details = {
            "parameters": rank.layout.names(bucket.index),
            "bytes": bucket.nbytes,
            "MiB per second": round(bucket.nbytes / 2**20 / seconds, 1) if seconds else None,
            "held for ms": bucket.held_ns / 1e6,
            "hidden ms": (bucket.hidden_ns(wire) if wire else 0) / 1e6,
            "rank stands still for ms": bucket.awaited_ns / 1e6,
        }
        yield self._slice(tid, f"bucket {bucket.index}", flight, details)
        if wire:
            yield self._slice(tid, "on the wire", wire, {})
        if bucket.last_gradient_ns is not None:
            arrow = {"id": f"{self.pid}.{step.number}.{bucket.index}", "cat": "bucket"}
            yield self._event("s", COMPUTES, "last gradient", bucket.last_gradient_ns, **arrow)
            yield self._event("f", tid, "last gradient", flight.begin_ns, bp="e", **arrow)

    def _slice(self, tid: int, name: str, interval: Interval, args: dict[str, Any]) -> Event:
        return self._event("X", tid, name, interval.begin_ns, dur=interval.length_ns / 1e3, args=args)

    def _named(self, kind: str, tid: int, name: str) -> Iterator[Event]:
        yield {"ph": "M", "pid": self.pid, "tid": tid, "name": kind, "args": {"name": name}}
        order = {"process_name": "process_sort_index", "thread_name": "thread_sort_index"}[kind]
        yield {"ph": "M", "pid": self.pid, "tid": tid, "name": order, "args": {"sort_index": self.pid + tid}}

    def _event(self, phase: str, tid: int, name: str, t_ns: int, **more: Any) -> Event:
        return {"ph": phase, "pid": self.pid, "tid": tid, "name": name, "ts": (t_ns - self._begin_ns) / 1e3, **more}


def _flight(bucket: BucketHistory, rank: RankStep) -> Interval | None:
    """From launch to completion; to the end of the step, where that was not seen."""
    if bucket.launched_ns is None:
        return None
    return Interval(bucket.launched_ns, max(bucket.launched_ns, bucket.completed_ns or rank.interval.end_ns))


def lanes(intervals: Iterable[Interval]) -> list[int]:
    """For each interval a lane, so that none in one lane overlap."""
    places = sorted(enumerate(intervals), key=lambda item: item[1])
    lane_of = [0] * len(places)
    free_from_ns: list[int] = []
    for index, (begin_ns, end_ns) in places:
        lane = next((k for k, free_ns in enumerate(free_from_ns) if free_ns <= begin_ns), len(free_from_ns))
        free_from_ns[lane:] = [end_ns, *free_from_ns[lane + 1 :]]
        lane_of[index] = lane
    return lane_of
