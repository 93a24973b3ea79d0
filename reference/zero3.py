r"""Above DDP, ZeRO-3: parameters exist only while their layer runs. FSDP is this at heart.

    time ->
    compute                | fwd 1 |    | fwd 2 | .. | bwd 2 |    | bwd 1 |         | step, 1/n |
    communication  | all 1 |       | all 2 |   | all 2 |     | all 1 |
                                                             | own 2 |    | own 1 |

                   all: all-gather a layer's parameters        own: reduce-scatter its gradients

What it costs, for n ranks, B bytes of parameters, the largest layer L, optimizer state K:

    held by a rank  B/n + B/n + K/n, and 2L in backward        sent by a rank  3 (n-1)/n B

Half as many bytes again as DDP, to hold a model n times as large. There is no gather after the step: the next
forward gathers what it needs. Here every gather is exposed. FSDP starts the next layer's while
this layer computes, as DDP does with gradients; that is most of what it has beyond this.

A layer is a module with parameters of its own. They keep their shapes throughout; while they are away their storage
has 0 bytes. What autograd has saved for backward (often a transposed view) finds the values in the same storage
later on. Frozen parameters are not cut.

Messages go out in the order in which layers run. So all ranks must run the same layers in the same order, which
DDP's plan does not ask for; and a parameter can be read between steps by `weights()` only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .interface import DataParallel
from .sharding import OptimizerOf, Shards
from .wire import Wire


class Layer(Shards):
    """The parameters of one module. Between `gather` and `free` they are there, on this rank, whole."""

    def __init__(self, name: str, params: dict[str, nn.Parameter], wire: Wire):
        super().__init__(list(params.values()), wire)
        self.name, self.wire = name, wire
        self.arrived: set[str] = set()
        self.names = params.keys()
        self.own = nn.Parameter(self.own.detach().clone())  # it has to outlive `whole`
        self.whole_nbytes = self.whole.nbytes
        self.free()

    def gather(self) -> None:
        storage = self.whole.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.whole_nbytes)
            self.wire.gather(self.own, self.parts_of(self.whole), label=f"parameters of {self.name}").wait()

    def free(self) -> None:
        self.whole.untyped_storage().resize_(0)


class Zero3(DataParallel):
    """A part of every layer; whole layers one at a time."""

    def __init__(self, module: nn.Module, optimizer_of: OptimizerOf):
        super().__init__(module)
        self.layers: list[Layer] = []
        self.in_flight: list[tuple[Layer, Tensor, dist.Work]] = []
        layer_of: dict[nn.Parameter, Layer] = {}
        for name, submodule in module.named_modules():
            direct = {n: p for n, p in submodule.named_parameters(name, recurse=False) if p.requires_grad}
            if new := {n: p for n, p in direct.items() if p not in layer_of}:
                self.layers.append(Layer(name, new, self.wire))
                layer_of.update(dict.fromkeys(new.values(), self.layers[-1]))
            needed = list(dict.fromkeys(layer_of[p] for p in direct.values()))  # a tied weight is another layer's
            submodule.register_forward_pre_hook(partial(self.gather, needed))
            submodule.register_forward_hook(partial(self.after_forward, needed))
        for name, param in self.trainable.items():
            param.register_post_accumulate_grad_hook(partial(self.on_grad_accumulated, layer_of[param], name))
        self.optimizer = optimizer_of([layer.own for layer in self.layers])

    def gather(self, needed: list[Layer], *_: Any) -> None:
        for layer in needed:
            layer.gather()

    def after_forward(self, needed: list[Layer], module: nn.Module, inputs: Any, output: Any) -> None:
        """Free the layers, until backward comes to this module: then the gradient of its output is there."""
        self.free(needed)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self.gather, needed))

    def free(self, needed: list[Layer]) -> None:
        for layer in needed:
            layer.free()

    def on_grad_accumulated(self, layer: Layer, name: str, param: nn.Parameter) -> None:
        if not self.synchronizing:
            return
        layer.arrived.add(name)
        if layer.arrived == layer.names:
            part, work = self.wire.average_own_part(
                layer.parts_of(layer.take_gradients()), label=f"gradients of {layer.name}"
            )
            self.in_flight.append((layer, part, work))
            layer.arrived.clear()
            layer.free()

    def synchronize(self) -> None:
        """Own parts of the means are complete. After several backwards they are sums, as `.grad` is."""
        self.require_every_gradient({name for layer, _, _ in self.in_flight for name in layer.names})
        finished, self.in_flight = self.in_flight, []
        for layer, part, work in finished:
            work.wait()
            layer.add_to_own_gradient(part)

    def step(self) -> None:
        self.synchronize()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.free(self.layers)  # what a forward that raised has left behind is out of date

    def weights(self) -> dict[str, Tensor]:
        self.gather(self.layers)
        whole = {name: param.detach().clone() for name, param in self.trainable.items()}
        self.free(self.layers)
        return whole
