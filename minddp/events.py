"""What happens inside a step, as typed events.

The reducer tells its story to a *sink*: any callable that takes an `Event`. Off is the default (`None`, one
comparison per would-be event). A list's `append` is a sink, and the tests use just that to assert on order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple


class EventKind(enum.Enum):
    """One member per thing worth telling. `Event.subject` is the index named behind each."""

    FORWARD_BEGIN = "forward begins"  # no subject
    FORWARD_END = "forward ends"  # no subject
    BACKWARD_BEGIN = "backward begins"  # no subject: the first gradient has arrived
    PARAM_READY = "parameter ready"  # parameter
    BUCKET_READY = "bucket ready"  # bucket: its last gradient has arrived and is packed and scaled
    BUCKET_LAUNCHED = "bucket launched"  # bucket: its all-reduce has begun
    GRADIENTS_COMPLETE = "gradients complete"  # no subject: autograd is done, what is under way is waited for
    BUCKET_WAITED = "bucket waited"  # bucket: its all-reduce is known to be complete
    BUCKET_UNPACKED = "bucket unpacked"  # bucket: the averages are in the gradients
    BACKWARD_END = "backward ends"  # no subject
    BUCKETS_REBUILT = "buckets rebuilt"  # number of buckets now
    BUFFERS_BROADCAST = "buffers broadcast"  # number of buffers


class Event(NamedTuple):
    """`subject` is the index of a parameter or a bucket, as `EventKind` says; -1 where there is none."""

    kind: EventKind
    subject: int = -1

    def __str__(self) -> str:
        return self.kind.value if self.subject < 0 else f"{self.kind.value}: {self.subject}"


EventSink = Callable[[Event], object]
