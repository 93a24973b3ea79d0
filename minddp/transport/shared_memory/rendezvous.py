"""How the ranks of a group find out that they share a host, and connect: all of them, or none.

Each rank sends the name of its host, the address at which it listens, and the outcome through the process group.
Each pair of ranks connects by a Unix socket. Sockets listen in the abstract namespace: there is no file, and the
address ends with the process. Any process of the machine can see it and connect; only one that knows the listener's
token, which the ranks of the group alone receive, is accepted. No rank stops listening before all are connected, so
nothing else can have its address.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from minddp.platform.host import host_identity
from minddp.transport.protocols import Transport
from minddp.transport.shared_memory import segments
from minddp.transport.shared_memory.peer_sockets import Peer

GATHERED_BYTES = 1024  # per rank; room for the longest error, even if every character is escaped
MAX_ERROR_CHARACTERS = 150
LISTEN_BACKLOG = 1024
TOKEN_BYTES = 16


class CannotConnect(Exception):
    """The reason why this group cannot share memory: the same on every rank."""


def connect(group: Transport, ranks: Sequence[int], timeout_s: float) -> dict[int, Peer]:
    """Connections to the other `ranks`, those of `group` on this host, by rank. Collective in `group`.

    Raises:
        CannotConnect: on every rank, with the same reason, if any two ranks of a host cannot share memory.
    """
    deadline = time.monotonic() + timeout_s
    peers: dict[int, Peer] = {}
    error_here = ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel chooses an abstract address
        listener.listen(LISTEN_BACKLOG)
        token = secrets.token_hex(TOKEN_BYTES)
        listeners = gather_json(group, {"address": listener.getsockname().hex(), "token": token})
        try:
            os.close(segments.create(mmap.PAGESIZE))  # to see that memory can be made
            for rank in ranks:
                if rank < group.rank:
                    peers[rank] = _connect_to(listeners[rank], group.rank, deadline)
            while len(peers) < len(ranks) - 1:
                rank, peer = _accept(listener, token, deadline)
                peers[rank] = peer
        except OSError as error:
            error_here = f"rank {group.rank} cannot share memory with the others: {error}"
        require_success(group, error_here, peers)
    return peers


def gather_json(group: Transport, ours: object) -> list[Any]:
    """The values of all ranks, in rank order. Collective."""
    text = bytearray(json.dumps(ours).encode().ljust(GATHERED_BYTES))
    gathered = group.all_gather(torch.frombuffer(text, dtype=torch.uint8))
    return [json.loads(bytes(one.tolist())) for one in gathered]


def require_success(group: Transport, error_here: str, peers: Mapping[int, Peer]) -> None:
    """Close the connections to `peers` if any rank has an error. Collective.

    Raises:
        CannotConnect: with the error of the lowest such rank.
    """
    errors = [error for error in gather_json(group, error_here[:MAX_ERROR_CHARACTERS]) if error]
    if errors:
        for peer in peers.values():
            peer.close()
        raise CannotConnect(errors[0])


def name_of_host() -> str:
    """Equal on ranks of one host and network namespace, the scope of an address. Empty unless on Linux."""
    return host_identity("net") if hasattr(os, "memfd_create") else ""


def gather_hosts(group: Transport, name_here: str) -> list[str]:
    """The names of all ranks' hosts. Collective. Raises `CannotConnect` if a host has no name."""
    names = gather_json(group, name_here)
    if "" in names:
        raise CannotConnect(f"rank {names.index('')} does not run on Linux")
    return names


def _connect_to(listener: Mapping[str, str], our_rank: int, deadline: float) -> Peer:
    """Connect to a lower rank."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_seconds_until(deadline))
    connection.connect(bytes.fromhex(listener["address"]))
    connection.send(f"{listener['token']} {our_rank}".encode())
    return _peer(connection)


def _accept(listener: socket.socket, token: str, deadline: float) -> tuple[int, Peer]:
    """Wait for the next higher rank; returns it and its connection. Other processes are rejected."""
    while True:
        listener.settimeout(_seconds_until(deadline))
        connection, _ = listener.accept()
        connection.settimeout(_seconds_until(deadline))
        known, _, rank = connection.recv(100).partition(b" ")
        if secrets.compare_digest(known, token.encode()):
            return int(rank), _peer(connection)
        connection.close()


def _peer(connection: socket.socket) -> Peer:
    connection.settimeout(None)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, _, _ = struct.unpack("3i", credentials)
    try:
        return Peer(connection, os.pidfd_open(process))
    except (AttributeError, OSError):  # a system without such descriptors; a process in another container
        return Peer(connection, None)


def _seconds_until(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
