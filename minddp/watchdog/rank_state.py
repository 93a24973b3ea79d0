"""The state that a rank reports when it is asked: where it is, and which collectives it has launched."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from minddp.core.reducer import Reducer

LIBRARIES = ("torch", "minddp", "threading", "contextlib")  # not the script's own code


class Collective(NamedTuple):
    """The `number`-th collective of a rank. Collectives carry no names: those of equal numbers meet."""

    number: int
    operation: str
    numel: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.numel:,} {self.dtype}"


@dataclass(frozen=True)
class Progress:
    """Where a module's reducer is. `missing` maps buckets to the parameters whose gradients they wait for."""

    phase: str
    backward: int
    accumulates: bool = False
    missing: dict[int, tuple[str, ...]] = field(default_factory=dict)


def progress_of(reducer: Reducer, *, accumulates: bool) -> Progress:
    """Where the reducer is. Called from another thread: it looks and changes nothing."""
    current, plan = reducer.current, reducer.plan
    missing: dict[int, tuple[str, ...]] = {}
    for param in current.missing() if current is not None else ():
        bucket = plan.slot_of[param].bucket
        missing[bucket] = (*missing.get(bucket, ()), plan.params[param].name)
    return Progress(reducer.phase.name, reducer.num_passes, accumulates, missing)


@dataclass(frozen=True)
class RankState:
    """One rank's answer. `waiting_s`: for how long it has waited in the last `recent` collective, if it does."""

    rank: int
    host: str
    pid: int
    progress: Progress
    recent: tuple[Collective, ...]
    waiting_s: float | None
    where: str

    @property
    def last(self) -> Collective | None:
        return self.recent[-1] if self.recent else None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankState:
        fields = json.loads(text)
        progress = fields.pop("progress")
        progress["missing"] = {int(bucket): tuple(names) for bucket, names in progress["missing"].items()}
        fields["recent"] = tuple(Collective(*collective) for collective in fields["recent"])
        return cls(progress=Progress(**progress), **fields)


def where_is_main_thread() -> str:
    """`train.py:57 in evaluate`: the innermost frame of the main thread that is not a library's."""
    frame = innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES:
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown place"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
