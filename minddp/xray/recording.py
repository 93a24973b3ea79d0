"""A recording: plain data, the same in memory, in a file and between ranks.

A `Recording` holds a `RankRecording` for each rank that took part; that holds stamped events and the layouts by
which they are read: which parameter travelled in which bucket, and since when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from minddp.core.events import EventKind
from minddp.core.plan import BucketPlan, ParamSpec
from minddp.platform.clock_offset import ClockOffset

UNKNOWN_OFFSET = ClockOffset(0, None)
FORMAT = 1  # of the dictionaries that `Recording.to_dict` makes


class Stamped(NamedTuple):
    """An event of `minddp.core.events` and when it happened, in nanoseconds on the clock of its rank."""

    t_ns: int
    kind: EventKind
    subject: int = -1


@dataclass(frozen=True)
class ParamInfo:
    """A parameter's name and the size of its gradient; `dtype` as torch names it, such as "float32"."""

    name: str
    numel: int
    nbytes: int
    dtype: str = "float32"


@dataclass(frozen=True)
class BucketInfo:
    """One message: the parameters in it, by index, and its size."""

    params: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Which gradient travels in which bucket; `buckets` in launch order. Valid from `since_ns` on."""

    params: tuple[ParamInfo, ...]
    buckets: tuple[BucketInfo, ...]
    origin: str
    since_ns: int = 0

    @classmethod
    def of(cls, plan: BucketPlan, since_ns: int = 0) -> Layout:
        return cls(
            tuple(ParamInfo(p.name, p.numel, p.nbytes, str(p.dtype).removeprefix("torch.")) for p in plan.params),
            tuple(BucketInfo(tuple(slot.param for slot in b.slots), b.nbytes) for b in plan.buckets),
            plan.origin,
            since_ns,
        )

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def names(self, bucket: int) -> list[str]:
        return [self.params[param].name for param in self.buckets[bucket].params]

    def specs(self) -> list[ParamSpec]:
        """The parameters as the planner sees them. Devices are not recorded: all count as one."""
        cpu = torch.device("cpu")
        return [ParamSpec(p.name, p.numel, getattr(torch, p.dtype), cpu) for p in self.params]


@dataclass(frozen=True)
class RankRecording:
    """The events of one rank, in order of time; `dropped` counts older ones that the ring had no room for.

    `first_step` is the number of the first step in it, `clock` the offset to the first rank's clock, `error` the
    exception that ended the recording, if any.
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

    def layout_at(self, t_ns: int) -> Layout:
        """The layout that was valid at `t_ns`; the first one if that was earlier."""
        valid = [layout for layout in self.layouts if layout.since_ns <= t_ns]
        return valid[-1] if valid else self.layouts[0]

    def on_the_clock_of_the_first_rank(self) -> RankRecording:
        """The same with all times moved by the clock's offset."""
        by = self.clock.offset_ns
        return replace(
            self,
            events=tuple(Stamped(t + by, kind, subject) for t, kind, subject in self.events),
            layouts=tuple(replace(layout, since_ns=layout.since_ns + by) for layout in self.layouts),
            stopped_ns=self.stopped_ns + by,
            clock=replace(self.clock, offset_ns=0),
        )


@dataclass(frozen=True)
class Recording:
    """Several ranks' recordings of the same steps, in rank order, and `notes` for the reader.

    `has_plan`: the wrapper has bucket capacities that could be set otherwise.
    """

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
        return {
            "format": FORMAT,
            "title": self.title,
            "wrapper": self.wrapper,
            "notes": list(self.notes),
            "has_plan": self.has_plan,
            "ranks": [_rank_to_dict(rank) for rank in self.ranks],
        }

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
        "layouts": [asdict(layout) for layout in rank.layouts],
        "events": [[t, kind.name, subject] for t, kind, subject in rank.events],
    }


def _rank_from_dict(data: Mapping[str, Any]) -> RankRecording:
    nested = {
        "clock": ClockOffset(*data["clock"]),
        "layouts": tuple(_layout_from_dict(layout) for layout in data["layouts"]),
        "events": tuple(Stamped(t_ns, EventKind[kind], subject) for t_ns, kind, subject in data["events"]),
    }
    return RankRecording(**{**data, **nested})


def _layout_from_dict(data: Mapping[str, Any]) -> Layout:
    params = tuple(ParamInfo(**param) for param in data["params"])
    buckets = tuple(BucketInfo(tuple(bucket["params"]), bucket["nbytes"]) for bucket in data["buckets"])
    return Layout(params, buckets, data["origin"], data["since_ns"])
