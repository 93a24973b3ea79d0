r"""Above DDP, ZeRO-2: a bucket of gradients is reduce-scattered, so each rank receives only what it updates.

    time ->
    compute        | bwd 3 | bwd 2 | bwd 1 |     | step, 1/n |
    communication                  |b3 w3 b2|w2 b1 w1|       | b3 w3 b2 | w2 b1 w1 |
                                     reduce-scatter gradients    all-gather parameters

What it costs, for n ranks, B bytes of gradients, optimizer state K (as in `zero1.py`):

    held by a rank  B + B/n + K/n        sent by a rank  2 (n-1)/n B

As many bytes as DDP! A ring's all-reduce *is* a reduce-scatter and then an all-gather (`ring.py`); DDP
gathers gradients, this gathers parameters. A bucket is dropped as soon as it has been sent, so the whole of the
gradients never exists on any rank.

Gradients that accumulate under `no_sync` are whole again. That is why large trainings reduce in each micro-batch
instead, and add up the parts: call `synchronize()` after each backward.

What the next rung improves: the parameters, which are still whole on every rank (`zero3.py`).
"""

from __future__ import annotations

from .bucketed import Bucket
from .zero1 import Zero1


class Zero2(Zero1):
    """`Zero1`, with the gradients cut as well."""

    def launch(self, bucket: Bucket) -> None:
        shards = self.shards[bucket.index]
        parts = shards.parts_of(shards.take_gradients())
        self.current.launched.append(self.wire.average_own_part(parts, label=f"bucket {bucket.index}"))

    def synchronize(self) -> None:
        for shards, part in zip(self.shards, self.finished_buffers(), strict=True):
            shards.add_to_own_gradient(part)
