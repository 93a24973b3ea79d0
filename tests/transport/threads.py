"""Ranks as threads of this process: enough for sockets, shared memory and the worker."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minddp.transport.shared_memory import segments
from minddp.transport.shared_memory.control_block import ControlBlock
from minddp.transport.shared_memory.peer_sockets import Peer
from minddp.transport.shared_memory.segments import Segment

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


def control_blocks(world_size: int) -> list[Segment]:
    """For each rank, a mapping of the same control block."""
    nbytes = ControlBlock.nbytes(world_size)
    descriptor = segments.create(nbytes)
    blocks = [segments.attach(descriptor, nbytes, -1) for _ in range(world_size)]
    os.close(descriptor)
    return blocks


class ThreadGroup:
    """What ranks as threads gather."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        self._gathered: list[Any] = [None] * world_size

    def gather_on(self, rank: int) -> Callable[[object], list[Any]]:
        def gather(value: object) -> list[Any]:
            self._gathered[rank] = value
            self._barrier.wait(TIMEOUT_S)
            gathered = list(self._gathered)
            self._barrier.wait(TIMEOUT_S)
            return gathered

        return gather

    def of(self, rank: int) -> ThreadGroupRank:
        return ThreadGroupRank(self, rank)


class ThreadGroupRank:
    """As much of a transport as what replicas agree on needs."""

    def __init__(self, group: ThreadGroup, rank: int):
        self.rank = rank
        self.world_size = group.world_size
        self.all_gather = group.gather_on(rank)
