"""Collectives as one rank sees them: all-reduces, and broadcasts that it receives.

Buffers, which are broadcast in every step, have some kilobytes. A broadcast through shared memory would take more
messages than sending the bytes: one to say where they are, and one from each peer before that memory can be used
again. So the message contains the bytes, and the kernel keeps it until the peer reads it. The source waits for no
rank, and may overwrite its tensor at once. Only receivers have a time limit; the source notices that a peer has
ended in its next call.

The broadcasts from one rank are received in the order of its calls. Each message contains the number of all-reduces
before it. Otherwise an extra broadcast, from a rank that has evaluated alone, would be taken for the next one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from minddp.transport.protocols import AdditionOrder
from minddp.transport.shared_memory.messages import Broadcast
from minddp.transport.shared_memory.reduction_tracker import SAME_CALLS


@dataclass(eq=False)
class Collective:
    """A collective in flight. `future` is done once the result is in `tensor`, or has an error."""

    event_name: ClassVar[str] = "gloo:broadcast"  # in a profile
    name: str  # in errors
    tensor: torch.Tensor
    deadline: float  # of time.monotonic()
    future: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)

    def complete(self) -> None:
        self.future.set_result([self.tensor])

    def fail(self, error: str) -> None:
        self.future.set_exception(RuntimeError(error))

    def write(self, result: torch.Tensor) -> None:
        with torch.inference_mode(self.tensor.is_inference()):  # each thread has an inference mode of its own
            self.tensor.copy_(result.view(self.tensor.shape))


@dataclass(eq=False)
class SharedAllReduce(Collective):
    """All-reduce `number` of this rank. `addend` is flat and becomes the sum, which is then copied to `tensor`."""

    event_name: ClassVar[str] = "gloo:all_reduce"
    number: int = field(kw_only=True)
    addend: torch.Tensor = field(kw_only=True)
    order: AdditionOrder | None = field(kw_only=True, default=None)  # `None`: gloo's order

    def complete(self) -> None:
        if self.tensor is not self.addend:
            self.write(self.addend)
        super().complete()


@dataclass(eq=False)
class PendingBroadcast(Collective):
    """A broadcast from another rank, sent after `num_launched` all-reduces. `tensor` may have any strides."""

    num_launched: int = field(kw_only=True)

    def receive(self, message: Broadcast) -> None:
        """Raises a RuntimeError if the source has made another call."""
        num_launched, content = message
        if (num_launched, len(content)) != (self.num_launched, self.tensor.nbytes):
            raise RuntimeError(
                f"{self.name} has {len(content):,} bytes and was sent after {num_launched} all-reduces, but "
                f"{self.tensor.nbytes:,} bytes are expected after {self.num_launched}. {SAME_CALLS}"
            )
        self.write(torch.frombuffer(bytearray(content), dtype=torch.uint8).view(self.tensor.dtype))
        self.complete()


class BroadcastQueue:
    """The broadcasts from one rank: messages that arrived before the call, or calls made before the message."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.arrived: deque[Broadcast] = deque()
        self.expected: deque[PendingBroadcast] = deque()

    def match(self) -> None:
        """Complete every call whose message has arrived, in order."""
        while self.arrived and self.expected:
            self.expected[0].receive(self.arrived.popleft())
            self.expected.popleft()
