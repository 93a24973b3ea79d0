"""A recording: plain data, the same in memory, in a file and between ranks.

A `Recording` holds a `RankRecording` for each rank that took part. A file keeps neither the devices of parameters
nor that a gradient is sparse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups

FORMAT = 3  # of the dictionaries that `Recording.to_dict` makes


class Stamped(NamedTuple):
    """An event of `minddp.core.events` and its time in nanoseconds."""

    t_ns: int
    kind: EventKind
    subject: int = -1


@dataclass(frozen=True)
class RankRecording:
    """The events of one rank, in order of time, and its bucket plan at the end.

    `first_step` is the number of the first step, `is_full` if older events did not fit into the ring. Times are on
    the clock of the first rank within `clock_error_ns`. `adds_after_ns`: see `Transport.adds_after_s`.
    """

    rank: int
    world_size: int
    host: str
    device: str
    backend: str
    events: tuple[Stamped, ...]
    plan: BucketPlan
    stopped_ns: int
    first_step: int = 0
    is_full: bool = False
    clock_error_ns: int = 0
    adds_after_ns: int = 0

    def later(self, by_ns: int) -> RankRecording:
        """The recording with all its times `by_ns` later."""
        events = tuple(event._replace(t_ns=event.t_ns + by_ns) for event in self.events)
        return replace(self, events=events, stopped_ns=self.stopped_ns + by_ns)


@dataclass(frozen=True)
class Recording:
    """Ranks' recordings of the same steps, in rank order; `notes` for the reader; `has_plan`: see `Source`."""

    title: str
    ranks: tuple[RankRecording, ...]
    wrapper: str = "minddp"
    notes: tuple[str, ...] = ()
    has_plan: bool = True

    @property
    def world_size(self) -> int:
        return self.ranks[0].world_size

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, for JSON."""
        return {"format": FORMAT, **vars(self), "ranks": [_rank_to_dict(rank) for rank in self.ranks]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recording:
        """The inverse of `to_dict`.

        Raises:
            ValueError: the dictionary is of another format.
        """
        if data.get("format") != FORMAT:
            raise ValueError(
                f"This recording is of format {data.get('format')}, but this minddp reads format {FORMAT}; "
                f"record it again."
            )
        ranks = tuple(_rank_from_dict(rank) for rank in data["ranks"])
        return cls(data["title"], ranks, data["wrapper"], tuple(data["notes"]), data["has_plan"])


def _rank_to_dict(rank: RankRecording) -> dict[str, Any]:
    events = [[t_ns, kind.name, subject] for t_ns, kind, subject in rank.events]
    return {**vars(rank), "events": events, "plan": _plan_to_dict(rank.plan)}


def _rank_from_dict(data: Mapping[str, Any]) -> RankRecording:
    events = tuple(Stamped(t_ns, EventKind[kind], subject) for t_ns, kind, subject in data["events"])
    return RankRecording(**{**data, "events": events, "plan": _plan_from_dict(data["plan"])})


def _plan_to_dict(plan: BucketPlan) -> dict[str, Any]:
    params = [{"name": p.name, "numel": p.numel, "dtype": str(p.dtype).removeprefix("torch.")} for p in plan.params]
    buckets = [[slot.param for slot in bucket.slots] for bucket in plan.buckets]
    return {"params": params, "buckets": buckets, "origin": plan.origin}


def _plan_from_dict(data: Mapping[str, Any]) -> BucketPlan:
    cpu = torch.device("cpu")
    specs = [ParamSpec(p["name"], p["numel"], getattr(torch, p["dtype"]), cpu) for p in data["params"]]
    return plan_from_groups(specs, data["buckets"], data["origin"])
