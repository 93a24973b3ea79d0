"""A recording: plain data, the same in memory, in a file and between ranks.

A `Recording` holds a `RankRecording` for each rank that took part. That holds stamped events, and the layouts that
say which parameter travelled in which bucket. A file keeps neither the devices of parameters nor that a gradient
is sparse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.tools.xray.clock_offset import ClockOffset
from minddp.tools.xray.host import HostWait

UNKNOWN_OFFSET = ClockOffset(0, None)
MODULE = 2**24  # in a file, the subjects of module m are moved by m * MODULE
FORMAT = 1  # of the dictionaries that `Recording.to_dict` makes


class Stamped(NamedTuple):
    """An event of `minddp.core.events` and its time, in nanoseconds on the clock of its rank.

    `module` is an index of `RankRecording.modules`. Each module numbers its parameters and buckets from 0.
    """

    t_ns: int
    kind: EventKind
    subject: int = -1
    module: int = 0


class Layout(NamedTuple):
    """The bucket plan of a module, and the time since which it is in use."""

    plan: BucketPlan
    since_ns: int = 0
    module: int = 0


@dataclass(frozen=True)
class RankRecording:
    """The events of one rank, in order of time; `dropped` counts older ones that the ring had no room for.

    `first_step` is the number of the first step, `clock` the offset to the first rank's clock, `error` the
    exception that ended the recording. `adds_after_ns`: see `Transport.adds_after_s`. `modules` has names if there
    are several modules. `peak_bytes`: see `streams.py`. `launch_ns` is the cost of a launch for backward,
    `crowded_ns` the time for which a backward waits for cores that messages use: see [Note: core time].
    """

    rank: int
    world_size: int
    host: str
    device: str
    backend: str
    events: tuple[Stamped, ...]
    layouts: tuple[Layout, ...]
    stopped_ns: int
    clock_identity: str = ""
    first_step: int = 0
    capacity: int = 0
    dropped: int = 0
    clock: ClockOffset = UNKNOWN_OFFSET
    error: str | None = None
    adds_after_ns: int = 0
    modules: tuple[str, ...] = ()
    peak_bytes: int = 0
    host_waits: tuple[HostWait, ...] = ()
    launch_ns: float = 0.0
    crowded_ns: float = 0.0

    def plan_at(self, t_ns: int, module: int = 0) -> BucketPlan:
        """The plan that was in use at `t_ns`; the first one if that was earlier."""
        layouts = [layout for layout in self.layouts if layout.module == module]
        in_use = [layout.plan for layout in layouts if layout.since_ns <= t_ns]
        return in_use[-1] if in_use else layouts[0].plan

    def on_the_clock_of_the_first_rank(self) -> RankRecording:
        by = self.clock.offset_ns
        return replace(
            self,
            events=tuple(event._replace(t_ns=event.t_ns + by) for event in self.events),
            layouts=tuple(layout._replace(since_ns=layout.since_ns + by) for layout in self.layouts),
            stopped_ns=self.stopped_ns + by,
            clock=replace(self.clock, offset_ns=0),
        )


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

    @property
    def clock_error_ns(self) -> int | None:
        """The largest error between two ranks' times; `None` if it is not known."""
        if len(self.ranks) == 1:
            return 0
        known = [rank.clock.error_ns for rank in self.ranks if rank.clock.error_ns is not None]
        return max(known) if len(known) == len(self.ranks) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, for JSON."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format": FORMAT, **plain, "ranks": [_rank_to_dict(rank) for rank in self.ranks]}

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
    return {
        **{field.name: getattr(rank, field.name) for field in fields(rank)},
        "clock": [rank.clock.offset_ns, rank.clock.error_ns],
        "layouts": [_layout_to_dict(layout) for layout in rank.layouts],
        "events": [[t, kind.name, subject + MODULE * module] for t, kind, subject, module in rank.events],
    }


def _rank_from_dict(data: Mapping[str, Any]) -> RankRecording:
    known = {field.name for field in fields(RankRecording)}  # an older version wrote others
    nested = {
        "clock": ClockOffset(*data["clock"]),
        "layouts": tuple(_layout_from_dict(layout) for layout in data["layouts"]),
        "events": tuple(_event(*event) for event in data["events"]),
        "modules": tuple(data.get("modules", ())),
        "host_waits": tuple(HostWait(*wait) for wait in data.get("host_waits", ())),
    }
    return RankRecording(**{name: value for name, value in {**data, **nested}.items() if name in known})


def _event(t_ns: int, kind: str, subject: int) -> Stamped:
    module, above = divmod(subject + 1, MODULE)  # the subject may be -1
    return Stamped(t_ns, EventKind[kind], above - 1, module)


def _layout_to_dict(layout: Layout) -> dict[str, Any]:
    plan, since_ns, module = layout
    params = [{"name": p.name, "numel": p.numel, "dtype": str(p.dtype).removeprefix("torch.")} for p in plan.params]
    buckets = [{"params": [slot.param for slot in bucket.slots]} for bucket in plan.buckets]
    return {"params": params, "buckets": buckets, "origin": plan.origin, "since_ns": since_ns, "module": module}


def _layout_from_dict(data: Mapping[str, Any]) -> Layout:
    cpu = torch.device("cpu")
    specs = [ParamSpec(p["name"], p["numel"], getattr(torch, p["dtype"]), cpu) for p in data["params"]]
    groups = [bucket["params"] for bucket in data["buckets"]]
    return Layout(plan_from_groups(specs, groups, data["origin"]), data["since_ns"], data.get("module", 0))
