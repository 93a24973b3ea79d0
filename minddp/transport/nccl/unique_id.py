"""Before there is a communicator: which rank uses which GPU, and the unique id by which the ranks connect.

[Note: two ranks on one card]
NCCL refuses two ranks on one GPU of one host, or hangs. It compares hashes of the hosts, and a process with an
`NCCL_HOSTID` of its own in its environment counts as a host of its own. The traffic then goes through sockets, over
the loopback device. That is slow, but collectives, streams and their order are real, so it serves to test several
ranks on a single GPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from minddp.platform import wording
from minddp.platform.host import boot_id
from minddp.platform.store import Messages
from minddp.transport.protocols import Transport


class Introduction(NamedTuple):
    """A rank's host, as NCCL identifies it, and its GPU; or why it cannot take part."""

    host: str = ""
    card: str = ""
    obstacle: str = ""


def nccl_host() -> str:
    """Equal on two ranks that NCCL counts as one host. See [Note: two ranks on one card]."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname() + boot_id()


def share_unique_id(
    store: dist.Store, group: Transport, ours: Introduction, make_unique_id: Callable[[], bytes], limit_s: float
) -> bytes:
    """The unique id that rank 0 makes, once each rank has introduced itself. Collective.

    Raises:
        RuntimeError: some ranks did not come within `limit_s` seconds, or cannot take part. Names them.
        ValueError: several ranks use one GPU.
    """
    messages = Messages.open(store, "minddp/nccl", group.rank, group.world_size)
    messages.post(ours, "introduction")
    _check(_posted(messages, "introduction", range(group.world_size), limit_s))
    if group.rank == 0:
        messages.post(make_unique_id(), "unique id")
    [unique_id] = _posted(messages, "unique id", [0], limit_s)
    return cast("bytes", unique_id)


def _posted(messages: Messages, key: str, ranks: Sequence[int], limit_s: float) -> list[Any]:
    """The messages of `ranks`, in their order."""
    posted = messages.gather(key, limit_s=limit_s, ranks=ranks)
    if missing := set(ranks) - posted.keys():
        raise RuntimeError(
            f'transport="nccl": no answer from {wording.ranks(list(missing))} within {limit_s:g} s. All ranks of '
            f"the group must wrap a module with this transport, in the same order; look for an earlier error in "
            f"their logs."
        )
    return list(posted.values())


def _check(introductions: Sequence[Introduction]) -> None:
    """Raises the same error on every rank, since all ranks check the same."""
    for rank, introduction in enumerate(introductions):
        if introduction.obstacle:
            raise RuntimeError(
                f'transport="nccl" cannot be used on rank {rank}: {introduction.obstacle}. Or pass '
                f'transport="process_group".'
            )
    rank_of: dict[tuple[str, str], int] = {}
    for rank, introduction in enumerate(introductions):
        other = rank_of.setdefault((introduction.host, introduction.card), rank)
        if other != rank:
            raise ValueError(
                f"Ranks {other} and {rank} are on one GPU ({introduction.card}), which NCCL refuses. Give each a "
                f"GPU of its own: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the module is moved, "
                f"and as many ranks on a host as it has GPUs. To test several ranks on one card, start each with "
                f"another NCCL_HOSTID in its environment."
            )
