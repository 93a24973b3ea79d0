"""The events inside a step.

The reducer emits them to *sinks*: callables that take an `Event`. Without a sink, an event costs one comparison.
A list's `append` is a sink; the tests use it to assert on order.

A sink is called within backward, so it must be fast and must not raise. `BUCKET_COMPLETED` is emitted by the thread
that completes the collective, at any time, even after a sink has been removed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class EventKind(enum.Enum):
    """The kinds of events. The comment behind each says what `Event.subject` is."""

    FORWARD_BEGIN = "forward begins"  # no subject
    BUFFERS_BEGIN = "buffers begin to be synchronised"  # no subject
    BUFFERS_BROADCAST = "buffers broadcast"  # number of buffers
    BUCKETS_REBUILT = "buckets rebuilt"  # number of buckets now
    NO_SYNC = "no_sync"  # no subject: the backward of this forward will stay local
    FORWARD_END = "forward ends"  # no subject
    BACKWARD_BEGIN = "backward begins"  # no subject: a gradient has entered at the outputs, or reached a parameter
    GRADIENT_KEPT = "gradient kept"  # parameter: accumulated locally, outside any synchronised backward
    PARAM_READY = "parameter ready"  # parameter
    PACK_BEGIN = "packing begins"  # bucket: all gradients of one of its pack groups are there
    PACK_END = "packed"  # bucket: that group is in the bucket, and scaled
    BUCKET_READY = "bucket ready"  # bucket: its last gradient has arrived and is packed and scaled
    BUCKET_LAUNCHED = "bucket launched"  # bucket: its all-reduce begins, or its communication hook is called
    COMM_HOOK_RETURNED = "comm hook returned"  # bucket: the communication hook has given its future
    BUCKET_COMPLETED = "bucket completed"  # bucket: the collective itself is complete
    GRADIENTS_COMPLETE = "gradients complete"  # no subject: autograd is done, what is under way is waited for
    BUCKET_WAITED = "bucket waited"  # bucket: its all-reduce is known to be complete
    BUCKET_UNPACKED = "bucket unpacked"  # bucket: the averages are in the gradients
    BACKWARD_END = "backward ends"  # no subject
    OPTIMIZER_BEGIN = "optimizer begins"  # no subject: emitted by a recording, not by the reducer
    OPTIMIZER_END = "optimizer ends"  # no subject: as above
    ERROR = "error"  # no subject: a backward was cut short, or its gradients are missing


class Event(NamedTuple):
    """`subject` is the index of a parameter or a bucket, as `EventKind` says; -1 where there is none."""

    kind: EventKind
    subject: int = -1

    def __str__(self) -> str:
        return self.kind.value if self.subject < 0 else f"{self.kind.value}: {self.subject}"


EventSink = Callable[[Event], object]


class EventStream:
    """Passes events to any number of sinks. `sink` takes an event for all of them; `None` if there are none.

    `on_error` is called with each exception that the reducer raises. Exceptions in backward do not pass through the
    wrapper, so this is the only way to see all of them.
    """

    def __init__(self) -> None:
        self._sinks: tuple[EventSink, ...] = ()
        self.sink: EventSink | None = None
        self.on_error: Callable[[Exception], object] | None = None

    def watch(self, sink: EventSink) -> None:
        """Pass every event to `sink` from now on."""
        self._set_sinks((*self._sinks, sink))

    def unwatch(self, sink: EventSink) -> None:
        """Pass no more events to `sink`. Does nothing if it gets none."""
        self._set_sinks(tuple(other for other in self._sinks if other != sink))

    def emit(self, kind: EventKind, subject: int = -1) -> None:
        if self.sink is not None:
            self.sink(Event(kind, subject))

    def report(self, error: Exception) -> Exception:
        """`error` is about to be raised."""
        if self.on_error is not None:
            self.on_error(error)
        return error

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report exceptions raised in the block."""
        try:
            yield
        except Exception as error:
            self.report(error)
            raise

    def _set_sinks(self, sinks: tuple[EventSink, ...]) -> None:
        def tee(event: Event) -> None:
            for sink in sinks:
                sink(event)

        self._sinks = sinks
        self.sink = tee if len(sinks) > 1 else sinks[0] if sinks else None
