"""Ranks as threads of this process: enough for sockets, shared memory and the worker."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from minddp.transport.shared_memory.peer_sockets import Peer

TIMEOUT_S = 20.0


def on_threads(world_size: int, fn: Callable[..., Any]) -> list[Any]:
    """`[fn(0), fn(1), ...]`, at the same time."""
    with ThreadPoolExecutor(world_size) as pool:
        return [future.result(TIMEOUT_S) for future in [pool.submit(fn, rank) for rank in range(world_size)]]


def connected(world_size: int) -> list[dict[int, Peer]]:
    """For each rank, its connections to the others."""
    peers: list[dict[int, Peer]] = [{} for _ in range(world_size)]
    for low, high in itertools.combinations(range(world_size), 2):
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peers[low][high], peers[high][low] = (Peer(end, os.pidfd_open(os.getpid())) for end in ends)
    return peers


class ThreadGroup:
    """What a group of ranks as threads has in common; `of(rank)` is what one of them sees."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size)
        self.gathered: list[Any] = [None] * world_size

    def of(self, rank: int) -> ThreadGroupRank:
        return ThreadGroupRank(self, rank)


class ThreadGroupRank:
    """As much of a transport as the rendezvous needs."""

    def __init__(self, group: ThreadGroup, rank: int):
        self.rank = rank
        self.world_size = group.world_size
        self._group = group

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        self._group.gathered[self.rank] = tensor
        self._group.barrier.wait(TIMEOUT_S)
        gathered = list(self._group.gathered)
        self._group.barrier.wait(TIMEOUT_S)
        return gathered
