"""What happens around the wrapper: its state, copies of it, other wrappers, a communication hook."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from tests.parity.layers import WIDTH
from tests.parity.script import DEVICE

if TYPE_CHECKING:
    from tests.parity.side import Side


def load_state(side: Side) -> None:
    """A state dict of other weights."""
    state = side.ddp.state_dict()
    side.ddp.load_state_dict(
        {key: value * 0.9 if value.is_floating_point() else value for key, value in state.items()}
    )


def comm_hook(side: Side, name: str) -> None:
    """A communication hook, registered late, and only once."""
    if side.hook_name is None:
        side.register_hook(name)


def copy_wrapper(side: Side, how: str = "copied") -> None:
    """The script goes on with a copy of the wrapper, "copied" or "pickled", which has no communication hook."""
    side.kept, side.grads_once, side.hook_name = [], {}, None
    side.remove_hooks()
    side.use(copy.deepcopy(side.ddp) if how == "copied" else pickle.loads(pickle.dumps(side.ddp)))
    side.use_optimizer("sgd")


def wrap_again(side: Side) -> list[torch.Tensor]:
    """A second wrapper around the same module takes a step, while the first one exists; then the first one does."""
    first = side.ddp
    side.ddp = side.wrap(side.model)
    try:
        outputs = side.train()
    finally:
        side.ddp = first
    return outputs


class Beside(nn.Module):
    """A layer of the model, and a head of its own."""

    def __init__(self, shared: nn.Module):
        super().__init__()
        self.shared = shared
        self.own = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.shared(x))


def share(side: Side, layer: int) -> list[torch.Tensor]:
    """A step of another model, in a wrapper of its own, that shares a layer with this one."""
    torch.manual_seed(side.turn)
    side.zero()
    other = side.wrap(Beside(side.layer(layer)).to(DEVICE))
    output = other(side.batch(1).x)
    side.backward(output.square().mean())
    return [output, *(param.grad for param in other.module.own.parameters())]


def copy_on_rank(side: Side, rank: int) -> None:
    """One rank alone makes a deep copy of its wrapper; then each rank wraps its module anew."""
    side.kept, side.grads_once = [], {}
    side.remove_hooks()
    is_refused = side.ddp.process_group is _second_group()
    if side.rank == rank % side.script.world_size and not is_refused:
        copy.deepcopy(side.ddp)
    side.start_over()
    side.use_optimizer("sgd")


@functools.cache
def _second_group() -> dist.ProcessGroup:
    """All ranks once more: made once in a process."""
    return dist.new_group()


def move_group(side: Side, state: str) -> None:
    """The wrapper goes on in another process group of the same ranks; the next time, in the first one again.

    `state` is that of minddp's waits in the old group: "well", or "stuck", if the watchdog has ended them.
    """
    group = _second_group()
    if side.ddp.process_group is group:
        group = dist.group.WORLD
    if side.is_subject:
        if state == "stuck" and hasattr(side.ddp._transport, "end_waits"):
            side.ddp._transport.end_waits("the old group is stuck")
        side.ddp.move_to_group(group)
    else:
        side.ddp._update_process_group(group)


def overlap(side: Side) -> None:
    """From now on minddp's backward steps the optimizer, bucket by bucket; torch's optimizer steps afterwards."""
    if side.is_subject and side.overlapped is None:
        side.overlap()
