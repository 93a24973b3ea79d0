"""Recordings made by hand: a step whose times are known exactly, so that what is read from it can be checked.

A made-up rank computes for the given times; the wire between the ranks is ideal: a message begins when all ranks
have launched it and the one before is through, and takes a latency and its bytes at a bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from minddp.core.events import EventKind as K
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.tools.forecast.link import Link
from minddp.tools.xray.recording import RankRecording, Recording, Stamped

MS = 1_000_000  # nanoseconds
MIB = 2**20
WIRE, SLOW = Link(1e-3, 1000 * MIB), Link(0.5e-3, 250 * MIB)


@dataclass(frozen=True)
class Rank:
    """How long a rank computes. Its gradients arrive evenly within backward, in the order of the buckets."""

    forward_ms: float = 10
    loss_ms: float = 1
    backward_ms: float = 20
    pack_ms: float = 0
    copy_ms: float = 0.5
    optimizer_ms: float = 2
    other_ms: float = 1
    late_ms: float = 0


@dataclass
class Track:
    """One rank's events so far and its present time."""

    now_ns: int = 0
    events: list[Stamped] = field(default_factory=list)

    def emit(self, kind: K, subject: int = -1, *, after_ms: float = 0, at_ns: int | None = None) -> int:
        if at_ns is None:
            self.now_ns += round(after_ms * MS)
            at_ns = self.now_ns
        self.events.append(Stamped(at_ns, kind, subject))
        return at_ns


def layout(sizes_mib: Sequence[Sequence[float]], names: Sequence[str] | None = None) -> BucketPlan:
    """`sizes_mib[b]` are the sizes of bucket b's parameters; parameters are numbered in launch order."""
    params: list[ParamSpec] = []
    groups = []
    for sizes in sizes_mib:
        first = len(params)
        for size in sizes:
            name = names[len(params)] if names else f"layer{len(params)}.weight"
            params.append(ParamSpec(name, round(size * MIB / 4), torch.float32, torch.device("cpu")))
        groups.append(range(first, len(params)))
    return plan_from_groups(params, groups, "order of readiness")


def recording(
    ranks: Sequence[Rank],
    plan: BucketPlan,
    *,
    steps: int = 1,
    wire: Link = WIRE,
    title: str = "made up",
    meet: bool = True,
) -> Recording:
    """`steps` equal steps of all `ranks`, which `meet` before each; rank r's begins `late_ms` after the first's."""
    tracks = [Track() for _ in ranks]
    for _ in range(steps):
        for track in tracks if meet else []:
            track.now_ns = max(t.now_ns for t in tracks)
        _step(ranks, tracks, plan, wire)
    found = []
    for rank, track in enumerate(tracks):
        events = tuple(sorted(track.events, key=lambda event: event.t_ns))
        place = {"rank": rank, "world_size": len(ranks), "host": "somewhere", "device": "cpu", "backend": "gloo"}
        found.append(RankRecording(**place, events=events, plan=plan, stopped_ns=track.now_ns))
    return Recording(title, tuple(found))


def joined(recordings: Sequence[Recording]) -> Recording:
    """Recordings one after the other."""
    ranks = []
    for number, first in enumerate(recordings[0].ranks):
        events, begin = [], 0
        for made in recordings:
            events += [event._replace(t_ns=event.t_ns + begin) for event in made.ranks[number].events]
            begin += max(rank.stopped_ns for rank in made.ranks)
        ranks.append(replace(first, events=tuple(events), stopped_ns=begin))
    return replace(recordings[0], ranks=tuple(ranks))


def _step(ranks: Sequence[Rank], tracks: Sequence[Track], plan: BucketPlan, wire: Link) -> None:
    launches = [_until_gradients_complete(rank, track, plan) for rank, track in zip(ranks, tracks, strict=True)]
    free_ns = 0
    completed = []
    for index, bucket in enumerate(plan.buckets):
        begin_ns = max(free_ns, *(launched[index] for launched in launches))
        free_ns = begin_ns + round(1e9 * wire.seconds(bucket.nbytes))
        completed.append(free_ns)
    for rank, track in zip(ranks, tracks, strict=True):
        for index, at_ns in enumerate(completed):
            track.emit(K.BUCKET_COMPLETED, index, at_ns=at_ns)
        _from_gradients_complete(rank, track, completed)


def _until_gradients_complete(rank: Rank, track: Track, plan: BucketPlan) -> list[int]:
    """When each bucket is launched."""
    track.now_ns += round(rank.late_ms * MS)
    track.emit(K.FORWARD_BEGIN)
    track.emit(K.FORWARD_END, after_ms=rank.forward_ms)
    track.emit(K.BACKWARD_BEGIN, after_ms=rank.loss_ms)
    launched = []
    for index, bucket in enumerate(plan.buckets):
        for slot in bucket.slots:
            track.emit(K.PARAM_READY, slot.param, after_ms=rank.backward_ms / len(plan.params))
        track.emit(K.PACK_BEGIN, index)
        track.emit(K.PACK_END, index, after_ms=rank.pack_ms)
        track.emit(K.BUCKET_READY, index)
        launched.append(track.emit(K.BUCKET_LAUNCHED, index))
    track.emit(K.GRADIENTS_COMPLETE)
    return launched


def _from_gradients_complete(rank: Rank, track: Track, completed: Sequence[int]) -> None:
    for index, at_ns in enumerate(completed):
        track.now_ns = max(track.now_ns, at_ns)
        track.emit(K.BUCKET_WAITED, index)
        track.emit(K.BUCKET_UNPACKED, index, after_ms=rank.copy_ms)
    track.emit(K.BACKWARD_END)
    track.emit(K.OPTIMIZER_BEGIN)
    track.emit(K.OPTIMIZER_END, after_ms=rank.optimizer_ms)
    track.now_ns += round(rank.other_ms * MS)
