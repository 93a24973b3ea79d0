"""Uneven inputs: a rank that has run out goes on taking part, with zeros, until the last one is done.

Collectives need every rank. So a rank whose data ends early *shadows* the others: for each step of theirs it
makes the same collectives in the same order, contributing nothing. `torch.distributed.algorithms.Join` leads the
way: a rank that trains calls `notify_join_context` in each forward; one that has left its loop calls `main_hook`
for as long as any rank still notifies, and all call `post_hook` at the end.

A step of an active rank, and what its shadow does:

    forward    notify: "still here"        the loop in Join counts who is
               rebuild the buckets         the same
               synchronise buffers         the same, from the highest active rank
               tell whether it syncs       listen
    backward   all-reduce each bucket      all-reduce zeros
               exchange who used what      exchange "nothing"
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.distributed.algorithms.join import JoinHook

from minddp.reducer import Reducer
from minddp.transport import Transport


class Shadowed(Protocol):
    """The wrapper, as its shadow sees it."""

    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _transport: Transport
    _reducer: Reducer
    _authoritative_rank: int

    @property
    def device(self) -> torch.device: ...

    def synchronize(self, source: int, *, buffers: bool) -> None: ...

    def _synchronizes_buffers(self, *, after_forward: bool) -> bool: ...

    def _synchronize_buffers(self, *, still_active: bool) -> None: ...


class Shadow(JoinHook):
    """What one module does on a rank that has run out of inputs."""

    def __init__(self, ddp: Shadowed):
        super().__init__()
        self._ddp = ddp

    def main_hook(self) -> None:
        """Shadow one step of the ranks that still have inputs."""
        ddp, reducer = self._ddp, self._ddp._reducer
        reducer.ensure_finished()
        reducer.rebuild_if_due()
        if ddp._synchronizes_buffers(after_forward=False):
            ddp._synchronize_buffers(still_active=False)
        is_synchronised = somebody_synchronises(ddp._transport, ddp.device, ours=False)
        if ddp._synchronizes_buffers(after_forward=True):
            ddp._synchronize_buffers(still_active=False)
        ddp.require_forward_param_sync = is_synchronised
        if is_synchronised:
            reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks end with the model of one that was trained to the last."""
        ddp = self._ddp
        ddp._authoritative_rank = highest_rank(ddp._transport, ddp.device, ours=is_last_joiner)
        ddp.synchronize(ddp._authoritative_rank, buffers=ddp.forward_sync_buffers)


def somebody_synchronises(transport: Transport, device: torch.device, *, ours: bool) -> bool:
    """Whether the step that has begun ends in a reduction on any rank. Collective."""
    votes = torch.tensor([float(ours)], device=device)
    transport.all_reduce(votes).wait()
    return votes.item() > 0


def highest_rank(transport: Transport, device: torch.device, *, ours: bool) -> int:
    """The highest rank that qualifies. Collective; at least one does."""
    candidate = torch.tensor([transport.rank if ours else -1], device=device)
    return int(max(int(rank.item()) for rank in transport.all_gather(candidate)))
