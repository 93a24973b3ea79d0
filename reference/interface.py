"""What all rungs of the ladder have in common.

    ddp = Rung(module)              # every rank now holds rank 0's weights
    loss_of(ddp(x)).backward()      # x: this rank's own part of the batch
    ddp.synchronize()               # every .grad is now the mean over the ranks
    optimizer.step()                # equal weights, equal gradients: the replicas stay equal

That is all of data parallelism. Each rank is an ordinary single-process training script; *equal weights at
the start* and *equal gradients at every step* keep the replicas equal, and weights are never sent
again. The rungs differ only in when and in what portions the gradients travel.

[Note: the explicit call]
`synchronize()` is a call of its own because that shows what happens: it marks the moment from which the
optimizer may read the gradients, and what it takes is the communication that backward did not hide. torch's
DDP asks for no such call. The last rung, `automatic.py`, shows how it can disappear.

[Note: the hook receives the parameter]
The rungs above `flat` use `param.register_post_accumulate_grad_hook(hook)`. It calls `hook(param)`: the
argument is the *parameter*, whose `.grad` is now complete. Averaging the argument itself averages weights
that are equal already. That changes nothing, raises nothing and even trains, while the replicas
diverge. The similar `param.register_hook(hook)` does pass a gradient, but only what the present backward
adds, *before* it is added to `.grad`: with accumulation over several micro-batches the earlier ones would
never be averaged. Neither mistake can be seen from the outside except by comparing values, which is what
`oracle.py` is for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .wire import Wire


class DataParallel(nn.Module, ABC):
    """A module on each rank whose gradients are averaged over the ranks.

    Frozen parameters (no `requires_grad`) stay out; a weight used under two names is one parameter.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.wire = Wire()
        self.synchronizing = True
        self.trainable = {name: param for name, param in module.named_parameters() if param.requires_grad}
        if not self.trainable:
            raise ValueError(
                f"{type(module).__name__} has no parameter that requires a gradient, so there is nothing to "
                "average. Use it without a wrapper."
            )
        for tensor in (*module.parameters(), *module.buffers()):
            self.wire.take_from_rank_0(tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for this rank's part of the batch. No communication."""
        return self.module(*args, **kwargs)

    def weights(self) -> dict[str, Tensor]:
        """Every trainable parameter, whole, by its name in the module."""
        return {name: param.detach() for name, param in self.trainable.items()}

    @abstractmethod
    def synchronize(self) -> None:
        """Return once every trainable parameter's `.grad` is its mean over the ranks."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add to the local `.grad`; the next one outside averages the sum."""
        previous, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = previous

    def require_every_gradient(self, arrived: Container[str]) -> None:
        """Raise unless `arrived` holds the name of every trainable parameter.

        Leaving one out is not possible: the other ranks would wait for its message, or take the next one for
        it. (torch's DDP can agree on parameters that go unused: `find_unused_parameters`.)
        """
        missing = [name for name in self.trainable if name not in arrived]
        if missing:
            raise RuntimeError(
                f"No gradient for {listed(missing)} on rank {self.wire.rank}. Every trainable parameter must "
                "take part in every synchronised backward: let the loss use it, or freeze it with "
                "requires_grad_(False) before wrapping the module."
            )

    def refuse_second_arrival(self, name: str, arrived: Container[str]) -> None:
        """Raise if `name` is in `arrived`: its previous average may still be on the wire."""
        if name in arrived:
            raise RuntimeError(
                f"A second gradient for {listed([name])} on rank {self.wire.rank} before synchronize(). Call "
                "synchronize() after each backward, or run all but the last backward under no_sync()."
            )


def gradient(param: nn.Parameter) -> Tensor:
    """`param.grad`, which is known to be there."""
    assert param.grad is not None
    return param.grad


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
