"""The unique id by which all ranks join a communicator, sent through the store of the process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from minddp.platform import wording
from minddp.platform.store import Messages
from minddp.transport.protocols import Transport


def share_unique_id(
    store: dist.Store, group: Transport, error_here: str, make_unique_id: Callable[[], Any], limit_s: float
) -> Any:
    """The unique id that rank 0 makes, bytes or a tuple of numbers, unless a rank has an error. Collective.

    Raises:
        RuntimeError: some ranks did not come within `limit_s` seconds, or one has an error. On every rank.
    """
    messages = Messages.open(store, "minddp/nccl", group.rank, group.world_size)
    messages.post(error_here, "error")
    for rank, error in enumerate(_posted(messages, "error", range(group.world_size), limit_s)):
        if error:
            raise RuntimeError(
                f'transport="nccl" cannot be used on rank {rank}: {error}. Or pass transport="process_group".'
            )
    if group.rank == 0:
        messages.post(make_unique_id(), "unique id")
    return _posted(messages, "unique id", [0], limit_s)[0]


def _posted(messages: Messages, key: str, ranks: Sequence[int], limit_s: float) -> list[Any]:
    """The messages of `ranks`, in their order."""
    posted = messages.gather(key, limit_s=limit_s, ranks=ranks)
    if missing := set(ranks) - posted.keys():
        raise RuntimeError(
            f'transport="nccl": no answer from {wording.ranks(list(missing))} within {limit_s:g} s. All ranks of '
            f"the group must wrap a module with this transport, in the same order. Look for an earlier error in "
            f"their logs."
        )
    return [posted[rank] for rank in ranks]
