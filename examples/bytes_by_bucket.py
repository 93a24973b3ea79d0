"""An observer of events: counts the bytes that each bucket sends, live.

    with BytesByBucket(ddp, print):  # a line after each synchronised backward
        train(ddp)

An event names a bucket by its place in the launch order. The buckets are rebuilt after the first backward, so the
counter begins anew then. Bits are those of training without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import minddp
from minddp.core.events import Event, EventKind


class BytesByBucket:
    """`sent[b]` are the bytes that this rank has given to all-reduces of bucket b of the present plan."""

    def __init__(self, ddp: minddp.DistributedDataParallel, show: Callable[[str], object] | None = None):
        self.sent: Counter[int] = Counter()
        self.num_backwards = 0
        self._ddp = ddp
        self._show = show

    def __call__(self, event: Event) -> None:
        """Called in the middle of backward: quick, and without exceptions."""
        if event.kind is EventKind.BUCKETS_REBUILT:
            self.sent.clear()
        elif event.kind is EventKind.BUCKET_LAUNCHED:
            self.sent[event.subject] += self._ddp.plan.buckets[event.subject].nbytes
        elif event.kind is EventKind.BACKWARD_END:
            self.num_backwards += 1
            if self._show is not None:
                self._show(str(self))

    def __str__(self) -> str:
        buckets = ", ".join(f"bucket {bucket}: {sent:,}" for bucket, sent in sorted(self.sent.items()))
        return f"backward {self.num_backwards}, bytes so far: {buckets}"

    def __enter__(self) -> BytesByBucket:
        self._ddp.events.watch(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._ddp.events.unwatch(self)
