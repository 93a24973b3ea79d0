"""Collectives as one rank sees them: all-reduces, and broadcasts that it receives.

[Note: small broadcasts]
Buffers, which are broadcast in every step, have some kilobytes. A broadcast through shared memory would take more
messages than sending the bytes: one to say where they lie, and one from each peer before that memory can be used
again. So the bytes are part of the message, which the kernel keeps until the peer reads it. The source waits for no
rank, and may overwrite its tensor at once. Only receivers have a time limit; the source learns of a peer's end in
its next call.

The broadcasts from one rank are received in the order of its calls. Each says how many all-reduces came before it,
so that a surplus one, of a rank that has evaluated alone, is not taken for the next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from minddp.transport.protocols import AdditionOrder
from minddp.transport.shared_memory.messages import Broadcast
from minddp.transport.shared_memory.reduction_tracker import SAME_CALLS


@dataclass(eq=False)
class Collective:
    """Complete once the result is in `tensor`, or with an error. `name` is its name in errors."""

    event_name: ClassVar[str] = "gloo:broadcast"  # in a profile
    name: str
    tensor: torch.Tensor
    deadline: float  # of time.monotonic()
    is_complete: bool = False
    error: str | None = None
    _completion: threading.Lock = field(default_factory=threading.Lock)
    _callbacks: list[Callable[[], object]] = field(default_factory=list)

    def complete(self, error: str | None = None) -> None:
        with self._completion:
            self.error = error
            self.is_complete = True
            callbacks, self._callbacks = self._callbacks, []  # they may keep this and its memory alive
        for callback in callbacks:
            callback()

    def write(self, result: torch.Tensor) -> None:
        with torch.inference_mode(self.tensor.is_inference()):  # which mode is on depends on the thread
            self.tensor.copy_(result.view(self.tensor.shape))

    def when_complete(self, callback: Callable[[], object]) -> None:
        """Call it in the thread that completes this, or at once. It must be quick."""
        with self._completion:
            if not self.is_complete:
                self._callbacks.append(callback)
                return
        callback()


@dataclass(eq=False)
class Reduction(Collective):
    """All-reduce number `number` of this rank. `addend` is flat and becomes the sum; `tensor` may be another."""

    event_name: ClassVar[str] = "gloo:all_reduce"
    number: int = field(kw_only=True)
    addend: torch.Tensor = field(kw_only=True)
    order: AdditionOrder | None = field(kw_only=True, default=None)  # gloo's if `None`

    def complete(self, error: str | None = None) -> None:
        if error is None and self.tensor is not self.addend:
            self.write(self.addend)
        super().complete(error)


@dataclass(eq=False)
class InboundBroadcast(Collective):
    """A broadcast from another rank, expected after so many all-reduces. `tensor` may have any strides."""

    num_launched: int = field(kw_only=True)

    def take(self, message: Broadcast) -> None:
        """Complete with this content, or raise a RuntimeError if the source has made another call."""
        num_launched, content = message
        if (num_launched, len(content)) != (self.num_launched, self.tensor.nbytes):
            raise RuntimeError(
                f"{self.name} has {len(content):,} bytes and was sent after {num_launched} all-reduces, but "
                f"{self.tensor.nbytes:,} bytes are expected after {self.num_launched}. {SAME_CALLS}"
            )
        self.write(torch.frombuffer(bytearray(content), dtype=torch.uint8).view(self.tensor.dtype))
        self.complete()


class InboundBroadcasts:
    """The broadcasts from one rank: messages that arrived before the call, or calls made before the message."""

    def __init__(self) -> None:
        self.num_expected = 0
        self.arrived: deque[Broadcast] = deque()
        self.expected: deque[InboundBroadcast] = deque()

    def match(self) -> None:
        """Complete every call whose message has arrived, in order."""
        while self.arrived and self.expected:
            self.expected[0].take(self.arrived.popleft())
            self.expected.popleft()
