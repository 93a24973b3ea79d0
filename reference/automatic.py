r"""Rung 5, automatic: the end of `loss.backward()` is the synchronisation. Now it is a drop-in.

    time ->
    script         loss.backward() ------------------------------------------->| optimizer.step()
    compute        | bwd 3 | bwd 2 | bwd 1 |          | unpack |
    communication                  | b3 w3 b2 | w2 b1 w1 |
                                           \_ exposed _/

Costs what `bucketed` costs; only the moment of the wait moves, from a call the script must not forget into
`backward()` itself. The autograd engine keeps a list of callbacks to run when the present backward has
computed its last gradient, just before `backward()` returns. The first hook of a backward puts
`synchronize` on it. A plain training script now needs one changed line, `model = Automatic(model)`, and
that is the whole reason why DDP can be used without knowing how it works.

The callback cannot be registered once and for all, since the engine drops it after each backward; nor from
the forward, which cannot know whether a backward will follow. Hence the first hook.
"""

from __future__ import annotations

from torch import nn
from torch.autograd import Variable

from .bucketed import Bucketed


class Automatic(Bucketed):
    """`Bucketed`, with the call to `synchronize()` made by the autograd engine."""

    def on_grad_accumulated(self, name: str, param: nn.Parameter) -> None:
        if self.synchronizing and not self.current.arrived:
            Variable._execution_engine.queue_callback(super().synchronize)
        super().on_grad_accumulated(name, param)

    def synchronize(self) -> None:
        """Nothing is left to do: `backward()` returned with the averages in place."""
