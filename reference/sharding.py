"""What the rungs above DDP share: parameters in one buffer, cut into a part for each rank; and what a rank holds.

    training = Zero2(module, partial(torch.optim.Adam, lr=1e-3))
    loss_of(training(x)).backward()
    training.step()                 # every rank's weights are what one process would have

DDP keeps everything n times: n ranks hold equal parameters, gradients and optimizer states, and make equal
steps. But a rank that updates 1/n of the parameters needs the optimizer's state of these alone. That is the idea
of ZeRO (S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020).
The rungs cut the optimizer (`zero1.py`), then the gradients (`zero2.py`), then the parameters (`zero3.py`). All
have one interface, `Training`; it contains the optimizer, since that is cut first.

[Note: cutting across parameters]
The cut is at equal numbers of elements and goes right through parameters. So `own` has no shape but its length, and
the optimizer must work element by element, as SGD and Adam do. A rule that looks at a parameter as a matrix
(Adafactor, Muon) or at the norm of all of them (clipping) needs more communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .interface import gradient
from .wire import Log, Wire

OptimizerOf = Callable[[list[nn.Parameter]], Optimizer]


class Training(Protocol):
    """A module and its optimizer, on several ranks or devices."""

    module: nn.Module
    optimizer: Optimizer

    @property
    def wire(self) -> Log: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def step(self) -> None:
        """Average the gradients, update the parameters, drop the gradients."""

    def weights(self) -> dict[str, Tensor]:
        """Every trainable parameter, whole, by its name in `module`. All ranks must call it."""


class Shards:
    """Parameters of one dtype end to end in `whole`, padded to n equal parts; `own` is this rank's part.

    The parameters become views of `whole`. `own` is one as well: what the optimizer writes there, they show.
    """

    def __init__(self, params: list[nn.Parameter], wire: Wire):
        self.params = params
        self.rank, self.world_size = wire.rank, wire.world_size
        numel = sum(param.numel() for param in params)
        self.whole = params[0].new_zeros(-(-numel // wire.world_size) * wire.world_size)
        for param, view in zip(params, self.views_of(self.whole), strict=True):
            param.data = view.copy_(param.detach())
        self.own = nn.Parameter(self.parts_of(self.whole)[self.rank])

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """The parts of all ranks, as views."""
        return list(flat.detach().chunk(self.world_size))

    def views_of(self, flat: Tensor) -> Iterator[Tensor]:
        """The parts of all parameters, in their shapes."""
        start = 0
        for param in self.params:
            yield flat.detach()[start : start + param.numel()].view(param.shape)
            start += param.numel()

    def take_gradients(self) -> Tensor:
        """All gradients, in a buffer like `whole`. The parameters have none any more."""
        buffer = torch.zeros(self.whole.shape, dtype=self.whole.dtype, device=self.whole.device)
        for param, view in zip(self.params, self.views_of(buffer), strict=True):
            view.copy_(gradient(param))
            param.grad = None
        return buffer

    def add_to_own_gradient(self, part: Tensor) -> None:
        self.own.grad = part if self.own.grad is None else self.own.grad + part


class Held(NamedTuple):
    """Bytes in the memory of one rank. Counted from the storages that exist, each once."""

    parameters: int
    gradients: int
    optimizer: int


def held(module: nn.Module, optimizer: Optimizer) -> Held:
    """What exists at this moment. The optimizer's parameters count, if they are not the module's."""
    params = [*module.parameters(), *(param for group in optimizer.param_groups for param in group["params"])]
    states = (value for state in optimizer.state.values() for value in state.values())
    return Held(nbytes_of(params), nbytes_of(param.grad for param in params), nbytes_of(states))


def nbytes_of(values: Iterable[Any]) -> int:
    """The storages of all tensors among `values`."""
    local = (getattr(value, "_local_tensor", value) for value in values)  # of torch's DTensor: this rank's part
    storages = [tensor.untyped_storage() for tensor in local if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
