"""A source of events: any data-parallel wrapper that reports what it does."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from minddp.core.events import EventSink
from minddp.ddp import DistributedDataParallel
from minddp.xray.recording import Layout


class Source(Protocol):
    """A data-parallel wrapper, as the recorder sees it.

    `topic` is equal on all ranks that are about to take the same step of the same wrapper, and differs otherwise.
    `has_plan`: the wrapper's arguments can change its buckets. `steps_taken` counts synchronised backwards.
    """

    wrapper: str
    has_plan: bool
    title: str
    rank: int
    world_size: int
    device: torch.device
    backend: str

    @property
    def store(self) -> dist.Store | None: ...

    @property
    def topic(self) -> str: ...

    @property
    def steps_taken(self) -> int: ...

    def layout(self) -> Layout:
        """Which gradient travels in which bucket now."""
        ...

    def watch(self, sink: EventSink) -> None:
        """Send every event to `sink` from now on, until `unwatch`."""
        ...

    def unwatch(self, sink: EventSink) -> None: ...


class MinddpSource:
    """minddp's own wrapper: its reducer reports everything itself."""

    wrapper = "minddp"
    has_plan = True

    def __init__(self, ddp: DistributedDataParallel):
        self._reducer = ddp._reducer
        self.title = type(ddp.module).__name__
        self.rank = self._reducer.transport.rank
        self.world_size = self._reducer.transport.world_size
        self.device = ddp.device
        self.backend: str = dist.get_backend(ddp.process_group)
        self.watch = self._reducer.events.watch
        self.unwatch = self._reducer.events.unwatch

    @property
    def store(self) -> dist.Store | None:
        return self._reducer.transport.store

    @property
    def topic(self) -> str:
        return f"minddp/xray/{self._reducer.unfinished.serial}/{self.steps_taken}"

    @property
    def steps_taken(self) -> int:
        return self._reducer.num_passes

    def layout(self) -> Layout:
        return Layout.of(self._reducer.plan)
