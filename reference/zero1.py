r"""Above DDP, ZeRO-1: each rank keeps the optimizer's state of 1/n of the parameters, and updates only those.

    time ->
    compute        | bwd 3 | bwd 2 | bwd 1 |          | step, 1/n |
    communication                  | b3 w3 b2 | w2 b1 w1 |        | b3 w3 b2 | w2 b1 w1 |
                                       all-reduce gradients          all-gather parameters

What it costs, for n ranks, B bytes of parameters and as many of gradients, and an optimizer with K bytes of state:

    held by a rank  B + B + K/n        sent by a rank  3 (n-1)/n B, where DDP sends 2 (n-1)/n B

For Adam K is 2B (and 6B, if parameters are halves and the optimizer keeps floats): the largest of the three. The
computation of the step is cut by n as well. The price is that the updated parameters must be
gathered, and they cannot hide behind backward, which is over.

What the next rung improves: every rank receives all averages and reads 1/n of them (`zero2.py`).
"""

from __future__ import annotations

from torch import nn

from .bucketed import MIB, Bucket, Bucketed
from .sharding import OptimizerOf, Shards


class Zero1(Bucketed):
    """`Bucketed`, and an optimizer for this rank's part of each bucket."""

    def __init__(self, module: nn.Module, optimizer_of: OptimizerOf, cap_bytes: int = 25 * MIB):
        super().__init__(module, cap_bytes)
        self.shards = [Shards(self.params_of(bucket), self.wire) for bucket in self.plan]
        self.optimizer = optimizer_of([shards.own for shards in self.shards])

    def launch(self, bucket: Bucket) -> None:
        buffer = self.shards[bucket.index].take_gradients()
        work = self.wire.average(buffer, label=f"bucket {bucket.index}")
        self.current.launched.append((buffer, work))

    def synchronize(self) -> None:
        for shards, buffer in zip(self.shards, self.finished_buffers(), strict=True):
            for param, view in zip(shards.params, shards.views_of(buffer), strict=True):
                param.grad = view
            shards.own.grad = shards.parts_of(buffer)[self.wire.rank]

    def step(self) -> None:
        self.synchronize()
        self.optimizer.step()
        self.zero_grad()
        self.optimizer.zero_grad()
        gathers = [
            self.wire.gather(shards.own, shards.parts_of(shards.whole), label=f"parameters {index}")
            for index, shards in enumerate(self.shards)
        ]
        for work in gathers:
            work.wait()
