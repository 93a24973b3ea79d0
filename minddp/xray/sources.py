"""What can be recorded: anything that averages gradients and tells what it does."""

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
    `has_plan` tells that its buckets could be had otherwise by the wrapper's arguments.
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
    def steps_taken(self) -> int:
        """Synchronised backwards so far."""
        ...

    def layout(self) -> Layout:
        """Which gradient travels in which bucket now."""
        ...

    def watch(self, sink: EventSink) -> None:
        """Tell `sink` every event from now on, until `unwatch`."""
        ...

    def unwatch(self, sink: EventSink) -> None: ...


class MinddpSource:
    """minddp's own wrapper: its reducer tells everything itself."""

    wrapper = "minddp"
    has_plan = True

    def __init__(self, ddp: DistributedDataParallel):
        self._reducer = ddp._reducer
        self.title = type(ddp.module).__name__
        self.rank = self._reducer.transport.rank
        self.world_size = self._reducer.transport.world_size
        self.device = ddp.device
        self.backend: str = dist.get_backend(ddp.process_group)

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

    def watch(self, sink: EventSink) -> None:
        self._reducer.events.watch(sink)

    def unwatch(self, sink: EventSink) -> None:
        self._reducer.events.unwatch(sink)
