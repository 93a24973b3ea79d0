r"""Rung 3, overlapped: average each gradient the moment backward has finished it.

    time ->
    compute        | bwd 3 | bwd 2 | bwd 1 |               | step |
    communication          | b3 | w3 | b2 | w2 | b1 |  w1  |
                                           \__ exposed ____/

Autograd calls a hook whenever a parameter's gradient is complete. The hook starts an *asynchronous*
all-reduce and returns at once: the message travels while autograd computes the next layer. `synchronize()`
only waits for what is still under way.

What it costs (P parameters, B bytes, latency a, bandwidth beta, as in `naive.py`):

    messages  P        bytes  B        exposed  P*a + B/beta, less what backward takes after the first hook

The gradients that come last (the first layer's) cannot be hidden by anything, here or on any later rung.

Two faults are left. The P latencies are back. And messages go out in the order in which gradients become
*ready*, which is a property of the graph a rank happened to run: if two ranks run their layers in different
orders, one rank's first message meets another parameter's on the other rank. With equal sizes that sums
unrelated gradients without an error; with different sizes it hangs or crashes.

What the next rung improves: both faults, by deciding on the messages beforehand (`bucketed.py`).
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import nn

from .interface import DataParallel, gradient


class Overlapped(DataParallel):
    """One message per parameter, launched inside backward."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.in_flight: dict[str, dist.Work] = {}
        for name, param in self.trainable.items():
            param.register_post_accumulate_grad_hook(partial(self.on_grad_accumulated, name))

    def on_grad_accumulated(self, name: str, param: nn.Parameter) -> None:
        """Autograd has completed `param.grad`."""
        if not self.synchronizing:
            return
        self.refuse_second_arrival(name, self.in_flight)
        # Not `param` itself. See [Note: the hook receives the parameter] in interface.py.
        self.in_flight[name] = self.wire.average(gradient(param), label=name)

    def synchronize(self) -> None:
        finished, self.in_flight = self.in_flight, {}
        self.require_every_gradient(arrived=finished)
        for work in finished.values():
            work.wait()
