"""The wire between the ranks, and a log of what went over it.

A rung of DDP's ladder makes only two kinds of collectives: a broadcast from rank 0 and an average over the
ranks. The rungs above it take the average apart: its first half leaves each rank a part of the mean, its second
half gathers the parts. All go through a `Wire`, which logs each message, so that rungs can be compared by what
they send, and tests can check in which order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Message:
    """One collective: what it carried, in words, its whole payload, and what this rank sent to carry it out.

    In a ring (`ring.py`) a payload goes round once, less one n-th, in each half of an all-reduce.
    """

    label: str
    nbytes: int
    sent_nbytes: int


class Log:
    """What was `sent`, in that order."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def log(self, label: str, nbytes: int, sent_nbytes: int) -> None:
        self.sent.append(Message(label, nbytes, sent_nbytes))


class Wire(Log):
    """The default process group, with `sent`: what this rank launched after construction, in that order.

    Collectives have no address. The k-th one a rank launches meets the k-th one of every other rank, whatever
    each of them holds, so *all ranks must launch the same messages in the same order*. That one rule
    determines the design of every rung.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()

    @torch.no_grad()
    def take_from_rank_0(self, tensor: Tensor) -> None:
        """Overwrite `tensor` on every rank with rank 0's values."""
        dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def average(self, tensor: Tensor, label: str) -> dist.Work:
        """Start to replace `tensor`, in place, by its mean over the ranks; `.wait()` on what is returned.

        The division comes before the sum: in half precision the sum of many gradients may overflow where
        their mean does not. (It is also what torch's DDP does.)
        """
        self.log(label, tensor.nbytes, 2 * self.in_a_ring(tensor.nbytes))
        tensor.div_(self.world_size)
        return cast(dist.Work, dist.all_reduce(tensor, op=dist.ReduceOp.SUM, async_op=True))

    @torch.no_grad()
    def average_own_part(self, parts: list[Tensor], label: str) -> tuple[Tensor, dist.Work]:
        """The mean of `parts[rank]` alone, complete when the work is; `parts` are used up. A reduce-scatter."""
        nbytes = sum(part.nbytes for part in parts)
        self.log(label, nbytes, self.in_a_ring(nbytes))
        for part in parts:
            part.div_(self.world_size)
        own = torch.empty_like(parts[self.rank])
        return own, cast(dist.Work, dist.reduce_scatter(own, parts, async_op=True))

    @torch.no_grad()
    def gather(self, own: Tensor, parts: list[Tensor], label: str) -> dist.Work:
        """Start to write the `own` of each rank into `parts[rank]`. An all-gather."""
        nbytes = sum(part.nbytes for part in parts)
        self.log(label, nbytes, self.in_a_ring(nbytes))
        return cast(dist.Work, dist.all_gather(parts, own.detach(), async_op=True))

    def in_a_ring(self, nbytes: int) -> int:
        """What this rank sends in one round."""
        return (self.world_size - 1) * nbytes // self.world_size
