r"""Below DDP, data_parallel: one process, a replica on each device, a thread for each. What `nn.DataParallel` does.

    time ->
    thread 0, device 0   | scatter x, copy weights | fwd | gather y | loss | bwd | add gradients | step |
    thread 1, device 1                             | fwd |                 | bwd |
    thread 2, device 2                             | fwd |                 | bwd |

The script sees one module and one batch, and needs no launcher. What it costs, for n devices and B bytes of
parameters:

    sent by device 0, in each step   (n-1) B of weights, and its inputs
    received by device 0             (n-1) B of gradients, and all outputs

That is why DDP replaced it. A rank of a ring sends less than 2B however many ranks there are. Here nothing is
hidden, either; device 0 holds the batch, the outputs and the optimizer for all; Python's lock lets one thread at a
time start an operation; and a process does not reach beyond its machine. DDP turns it inside out: the replicas
are there from the start, each with an optimizer of its own, and only gradients travel.

The copies are made by operations that autograd knows, so no hook is needed: the gradient of "copy n times" is "add
up n". The loss is taken of the gathered output, so the gradient is that of the whole batch, without a division.

What the next rung improves: everything above, with a process for each replica (`naive.py`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .sharding import OptimizerOf
from .wire import Log


class DataParallelInOneProcess(nn.Module):
    """Scatter the batch, copy the weights, run the replicas at the same time, gather the outputs.

    `devices` may name one device several times, such as `["cpu", "cpu"]`. Buffers are those of the first replica.
    """

    def __init__(self, module: nn.Module, optimizer_of: OptimizerOf, devices: list[str]):
        super().__init__()
        self.devices = [torch.device(device) for device in devices]
        self.module = module.to(self.devices[0])
        self.optimizer = optimizer_of([param for param in module.parameters() if param.requires_grad])
        self.wire = Log()

    def forward(self, x: Tensor) -> Tensor:
        """The module's outputs for the batch `x` [examples, ...], on the first device."""
        parts = x.chunk(len(self.devices))
        used = self.devices[: len(parts)]
        inputs = [part.to(device) for part, device in zip(parts, used, strict=True)]
        replicas = [self.copy_to(number, device) for number, device in enumerate(used)]
        with ThreadPoolExecutor(len(used)) as threads:
            run = partial(self.run, torch.is_grad_enabled())
            shapes = [without_memory(self.module) for _ in used]  # threads must not share one
            outputs = list(threads.map(run, shapes, replicas, inputs))
        return torch.cat([output.to(self.devices[0]) for output in outputs])

    def copy_to(self, number: int, device: torch.device) -> dict[str, Tensor]:
        """Copies of parameters, whose gradients come back, and of buffers. Replica 0 is the module itself."""
        tensors: dict[str, Tensor] = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        if number == 0:
            return tensors
        copies = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
        for name, copy in copies.items():
            self.wire.log(f"{name} to replica {number}", copy.nbytes, copy.nbytes)
            if copy.requires_grad:
                copy.register_hook(partial(self.log_gradient, f"gradient of {name} from replica {number}"))
        return copies

    @staticmethod
    def run(grad_enabled: bool, shape: nn.Module, replica: dict[str, Tensor], x: Tensor) -> Tensor:
        with torch.set_grad_enabled(grad_enabled):  # a new thread does not inherit it
            return functional_call(shape, replica, (x,))

    def log_gradient(self, label: str, grad: Tensor) -> None:
        self.wire.log(label, grad.nbytes, grad.nbytes)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self.module.named_parameters() if param.requires_grad}


def without_memory(module: nn.Module) -> nn.Module:
    """A copy of `module` to be called with other tensors than its own, which are empty."""
    tensors = [*module.parameters(), *module.buffers()]
    return deepcopy(module, {id(tensor): tensor.new_empty(0) for tensor in tensors})
