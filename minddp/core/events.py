"""What happens inside a step, as typed events.

The reducer tells its story to a *sink*: any callable that takes an `Event`. Off is the default (`None`, one
comparison per would-be event). A list's `append` is a sink, and the tests use just that to assert on order.

A sink is called in the middle of backward, so it must be quick and must not raise. `BUCKET_COMPLETED` is told by
the thread that has completed the collective, at any moment, also after a sink has been taken off.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple


class EventKind(enum.Enum):
    """One member per thing worth telling. `Event.subject` is the index named behind each."""

    FORWARD_BEGIN = "forward begins"  # no subject
    BUFFERS_BEGIN = "buffers begin to be synchronised"  # no subject
    BUFFERS_BROADCAST = "buffers broadcast"  # number of buffers
    REBUILD_BEGIN = "buckets begin to be rebuilt"  # no subject
    BUCKETS_REBUILT = "buckets rebuilt"  # number of buckets now
    NO_SYNC = "no_sync"  # no subject: the backward of this forward will stay local
    FORWARD_END = "forward ends"  # no subject
    BACKWARD_BEGIN = "backward begins"  # no subject: a gradient has entered at the outputs, or reached a parameter
    GRADIENT_KEPT = "gradient kept"  # parameter: accumulated locally, outside any synchronised backward
    PARAM_READY = "parameter ready"  # parameter
    PACK_BEGIN = "packing begins"  # bucket: all gradients of one of its runs are there
    PACK_END = "packed"  # bucket: that run is in the bucket, and scaled
    BUCKET_READY = "bucket ready"  # bucket: its last gradient has arrived and is packed and scaled
    BUCKET_LAUNCHED = "bucket launched"  # bucket: its all-reduce begins, or its communication hook is called
    COMM_HOOK_RETURNED = "comm hook returned"  # bucket: the communication hook has given its future
    BUCKET_COMPLETED = "bucket completed"  # bucket: the collective itself is complete, whoever looks
    GRADIENTS_COMPLETE = "gradients complete"  # no subject: autograd is done, what is under way is waited for
    USAGE_EXCHANGED = "usage exchanged"  # no subject: the ranks know who has used which parameter
    BUCKET_WAITED = "bucket waited"  # bucket: its all-reduce is known to be complete
    BUCKET_UNPACKED = "bucket unpacked"  # bucket: the averages are in the gradients
    BACKWARD_END = "backward ends"  # no subject
    OPTIMIZER_BEGIN = "optimizer begins"  # no subject: told by who records, not by the reducer
    OPTIMIZER_END = "optimizer ends"  # no subject: likewise
    ERROR = "error"  # no subject: a backward was cut short, or its gradients are missing


class Event(NamedTuple):
    """`subject` is the index of a parameter or a bucket, as `EventKind` says; -1 where there is none."""

    kind: EventKind
    subject: int = -1

    def __str__(self) -> str:
        return self.kind.value if self.subject < 0 else f"{self.kind.value}: {self.subject}"


EventSink = Callable[[Event], object]


def fan_out(sinks: Sequence[EventSink]) -> EventSink | None:
    """One sink that tells all of `sinks`, in order; `None` if there are none."""
    if len(sinks) <= 1:
        return sinks[0] if sinks else None

    def tell_all(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return tell_all
