"""One collective as one rank sees it: when it is over, and who wants to know."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Collective:
    """`name` is what errors call it. It lands with the result in `tensor`, or with an error."""

    name: str
    tensor: torch.Tensor
    deadline: float  # of time.monotonic()
    has_landed: bool = False
    error: str | None = None
    _landing: threading.Lock = field(default_factory=threading.Lock)
    _on_landing: list[Callable[[], object]] = field(default_factory=list)

    def land(self, error: str | None = None) -> None:
        with self._landing:
            self.error = error
            self.has_landed = True
            callbacks, self._on_landing = self._on_landing, []  # they may keep this and its memory alive
        for callback in callbacks:
            callback()

    def when_landed(self, callback: Callable[[], object]) -> None:
        """Have it called by the thread that finds this landed, or at once if it has. It must be quick."""
        with self._landing:
            if not self.has_landed:
                self._on_landing.append(callback)
                return
        callback()


@dataclass(eq=False)
class Reduction(Collective):
    """The all-reduce number `number` of this rank. `tensor` is flat: at first it is this rank's addend."""

    number: int = field(kw_only=True)


@dataclass(eq=False)
class Listener(Collective):
    """A broadcast on a rank that listens to it, after it has launched so many all-reduces. Any strides."""

    num_launched: int = field(kw_only=True)
