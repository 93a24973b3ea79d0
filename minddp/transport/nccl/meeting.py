"""Before there is a communicator: who is on which card, and the secret by which the ranks find each other.

[Note: two ranks on one card]
NCCL refuses two ranks on one GPU of one host, or hangs. By which it means equal host hashes, and a process whose
environment has an `NCCL_HOSTID` of its own counts as a host of its own. The traffic then goes through sockets, over
the loopback device. That is slow and shares the card's time, but collectives, streams and their order are real, so
it serves to test several ranks where there is a single card.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Introduction:
    """What a rank says of itself: on which host, as NCCL sees it, and card; or which obstacle it has met with."""

    host: str = ""
    card: str = ""
    obstacle: str = ""

    @classmethod
    def of_device(cls, device: torch.device) -> Introduction:
        return cls(host_as_nccl_sees_it(), f"{torch.cuda.get_device_properties(device).uuid}")


def host_as_nccl_sees_it() -> str:
    """See [Note: two ranks on one card]."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    booted = boot_id.read_text().strip() if boot_id.exists() else ""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname() + booted


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    ours: Introduction,
    make_unique_id: Callable[[], bytes],
    limit_s: float,
) -> bytes:
    """The unique id that all ranks share, once each has introduced itself. Collective.

    Raises:
        RuntimeError: some ranks did not come within `limit_s` seconds, or met with an obstacle. Names them.
        ValueError: several ranks have one card.
    """
    serial = store.add(f"minddp/nccl/opened by {rank}", 1)  # ranks open in one order, so they count alike
    keys = [f"minddp/nccl/{serial}/{other}" for other in range(world_size)]
    store.set(keys[rank], json.dumps(asdict(ours)))
    everyone = [Introduction(**json.loads(said)) for said in _await_all(store, keys, limit_s)]
    _check(everyone)
    key = f"minddp/nccl/{serial}/unique id"
    if rank == 0:
        store.set(key, make_unique_id().hex())
    [unique_id] = _await_all(store, [key], limit_s)
    return bytes.fromhex(unique_id.decode())


def _await_all(store: dist.Store, keys: list[str], limit_s: float) -> list[bytes]:
    try:
        store.wait(keys, datetime.timedelta(seconds=limit_s))
    except RuntimeError as error:
        missing = [key.rpartition("/")[2] for key in keys if not store.check([key])]
        raise RuntimeError(
            f'transport="nccl": after {limit_s:g} s there is still no word from: '
            f"{', '.join(missing) or 'the store'}. All ranks of the group must wrap a module with this transport, "
            f"in the same order; see the logs of those for an earlier error."
        ) from error
    return [store.get(key) for key in keys]


def _check(everyone: list[Introduction]) -> None:
    """The same verdict on every rank, since all look at the same."""
    for rank, introduction in enumerate(everyone):
        if introduction.obstacle:
            raise RuntimeError(
                f'transport="nccl" cannot be used on rank {rank}: {introduction.obstacle}. Or pass '
                f'transport="process_group".'
            )
    seats: dict[tuple[str, str], int] = {}
    for rank, introduction in enumerate(everyone):
        other = seats.setdefault((introduction.host, introduction.card), rank)
        if other != rank:
            raise ValueError(
                f"Ranks {other} and {rank} are on one GPU ({introduction.card}), which NCCL refuses. Give each a "
                f"GPU of its own: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the module is moved, "
                f"and as many ranks on a host as it has GPUs. To test several ranks on one card, start each with "
                f"another NCCL_HOSTID in its environment."
            )
