r"""Rung 1, naive: after backward, average the gradients one by one.

    time ->
    compute        | bwd 3 | bwd 2 | bwd 1 |                                          | step |
    communication                          | w1 | b1 | w2 | b2 | w3 | b3 |  wait each
                                           \_________ all of it exposed _________/

What it costs, for P parameters with B bytes of gradients in all, on a wire with latency a (seconds a message)
and bandwidth beta (bytes a second):

    messages  P        bytes  B        exposed  P*a + B/beta

A message costs its latency however small it is, and most parameters of a real model are small (biases,
norms).

What the next rung improves: the P latencies become one (`flat.py`).
"""

from __future__ import annotations

from .interface import DataParallel, gradient


class Naive(DataParallel):
    """The definition of data parallelism, in one loop."""

    def synchronize(self) -> None:
        self.require_every_gradient(
            arrived={name for name, param in self.trainable.items() if param.grad is not None}
        )
        # Registration order: the same on every rank.
        for name, param in self.trainable.items():
            self.wire.average(gradient(param), label=name).wait()
