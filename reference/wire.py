"""The wire between the ranks, and a log of what went over it.

A rung of the ladder makes only two kinds of collectives: a broadcast from rank 0 and an average over the
ranks. Both go through a `Wire`, which logs each message, so that rungs can be compared by what they send, and
tests can check in which order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Message:
    """One all-reduce: what it carried, in words, and its payload on each rank."""

    label: str
    nbytes: int


class Wire:
    """The default process group, with `sent`: the all-reduces of this rank in the order they were launched.

    Collectives have no address. The k-th one a rank launches meets the k-th one of every other rank, whatever
    each of them holds, so *all ranks must launch the same messages in the same order*. That one rule
    determines the design of every rung.
    """

    def __init__(self) -> None:
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.sent: list[Message] = []

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
        self.sent.append(Message(label, tensor.nbytes))
        tensor.div_(self.world_size)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, async_op=True)
        assert work is not None, "this rank belongs to the default group, so it takes part"
        return work
