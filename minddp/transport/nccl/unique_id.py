"""The unique id by which all ranks join a communicator, sent through the store of the process group."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from minddp.platform import wording
from minddp.platform.store import values_within
from minddp.transport.protocols import Transport


def share_unique_id(
    store: dist.Store, group: Transport, error_here: str, make_unique_id: Callable[[], Any], limit_s: float
) -> Any:
    """The unique id that rank 0 makes, bytes or a tuple of numbers, unless a rank has an error. Collective.

    Raises:
        RuntimeError: some ranks did not come within `limit_s` seconds, or one has an error. On every rank.
    """
    serial = store.add(f"minddp/nccl/opened by {group.rank}", 1)  # equal on all ranks: they open in one order
    keys = {rank: f"minddp/nccl/{serial}/{rank}" for rank in range(group.world_size)}
    store.set(keys[group.rank], repr(error_here))
    for rank, error in enumerate(_posted(store, keys, limit_s)):
        if error:
            raise RuntimeError(
                f'transport="nccl" cannot be used on rank {rank}: {error}. Or pass transport="process_group".'
            )
    key = f"minddp/nccl/{serial}/unique id"
    if group.rank == 0:
        store.set(key, repr(make_unique_id()))
    return _posted(store, {0: key}, limit_s)[0]


def _posted(store: dist.Store, key_of_rank: Mapping[int, str], limit_s: float) -> list[Any]:
    """The values that these ranks have posted, in their order."""
    posted = values_within(store, key_of_rank, limit_s)
    if missing := key_of_rank.keys() - posted.keys():
        raise RuntimeError(
            f'transport="nccl": no answer from {wording.ranks(list(missing))} within {limit_s:g} s. All ranks of '
            f"the group must wrap a module with this transport, in the same order. Look for an earlier error in "
            f"their logs."
        )
    return [ast.literal_eval(value.decode()) for value in posted.values()]
