"""How the ranks of a group find out that they share a host, and connect: all of them, or none.

Each rank sends the name of its host, the address at which it listens, and the outcome through the process group.
Each pair of ranks connects by a Unix socket, and proves that it can share memory by doing so. Sockets listen in the
abstract namespace: there is no file, and the address ends with the process. Any process of the machine may connect;
only one that knows the listener's secret is accepted.
"""

from __future__ import annotations

import json
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
from minddp.transport.shared_memory import messages, segments
from minddp.transport.shared_memory.peer_sockets import Peer

GATHERED_BYTES = 1024  # per rank; room for the longest error, even if every character is escaped
MAX_ERROR_CHARACTERS = 150
LISTEN_BACKLOG = 1024
SECRET_BYTES = 16
_GREETING = struct.Struct(f"<{SECRET_BYTES}sq")  # the listener's secret, the rank that connects


class CannotConnect(Exception):
    """The reason why this group cannot share memory: the same on every rank."""


def connect(group: Transport, ranks: Sequence[int], timeout_s: float) -> dict[int, Peer]:
    """Connections to the other `ranks`, those of `group` on this host, by index in `ranks`. Collective in `group`.

    Raises:
        CannotConnect: on every rank, with the same reason, if any two ranks of a host cannot share memory.
    """
    deadline, our_rank = time.monotonic() + timeout_s, ranks.index(group.rank)
    peers: dict[int, Peer] = {}
    error_here = ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as here:
        here.bind("")  # the kernel chooses an abstract address
        here.listen(LISTEN_BACKLOG)
        everyone = gather_json(group, _describe(here))
        listeners = [everyone[rank] for rank in ranks]
        try:
            for rank in range(our_rank):
                peers[rank] = _connect_to(listeners[rank], our_rank, deadline)
            while len(peers) < len(ranks) - 1:
                rank, peer = _accept(here, listeners[our_rank]["secret"], deadline)
                peers[rank] = peer
            _prove_that_memory_is_shared(peers, listeners, our_rank, deadline)
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


def require_one_host(group: Transport) -> None:
    """Raises `CannotConnect` unless all ranks are on one host. Collective."""
    names = gather_hosts(group, name_of_host())
    for rank, name in enumerate(names):
        if name != names[0]:
            raise CannotConnect(
                f"rank {rank} is on another host than rank 0, or in a container with its own network"
            )


def _describe(listener: socket.socket) -> dict[str, str]:
    return {"address": listener.getsockname().hex(), "secret": secrets.token_hex(SECRET_BYTES)}


def _connect_to(listener: Mapping[str, str], our_rank: int, deadline: float) -> Peer:
    """Connect to a lower rank."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_seconds_until(deadline))
    connection.connect(bytes.fromhex(listener["address"]))
    connection.send(_GREETING.pack(bytes.fromhex(listener["secret"]), our_rank))
    return _peer(connection)


def _accept(listener: socket.socket, secret: str, deadline: float) -> tuple[int, Peer]:
    """Wait for the next higher rank; returns it and its connection. Other processes are rejected."""
    while True:
        listener.settimeout(_seconds_until(deadline))
        connection, _ = listener.accept()
        connection.settimeout(_seconds_until(deadline))
        greeting = connection.recv(_GREETING.size)
        if len(greeting) == _GREETING.size:
            known, rank = _GREETING.unpack(greeting)
            if secrets.compare_digest(known, bytes.fromhex(secret)):
                return rank, _peer(connection)
        connection.close()


def _peer(connection: socket.socket) -> Peer:
    send_buffer_bytes = 4 * messages.MAX_BROADCAST_BYTES  # a message is sent as a whole
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, _, _ = struct.unpack("3i", credentials)
    try:
        return Peer(connection, os.pidfd_open(process))
    except (AttributeError, OSError):  # a system without such descriptors; a process in another container
        return Peer(connection, None)


def _prove_that_memory_is_shared(
    peers: Mapping[int, Peer], listeners: Sequence[Mapping[str, str]], our_rank: int, deadline: float
) -> None:
    """Send each peer a segment that contains our secret; find its secret in the segment that it sends."""
    descriptor = segments.create(SECRET_BYTES)
    try:
        os.pwrite(descriptor, bytes.fromhex(listeners[our_rank]["secret"]), 0)
        for peer in peers.values():
            socket.send_fds(peer.socket, [b"segment"], [descriptor])
    finally:
        os.close(descriptor)
    for rank, peer in peers.items():
        peer.socket.settimeout(_seconds_until(deadline))
        _, descriptors, _, _ = socket.recv_fds(peer.socket, 100, 1)
        if not descriptors:
            raise ConnectionError(f"rank {rank} has closed the connection")
        if segments.attach(descriptors[0], SECRET_BYTES)[:] != bytes.fromhex(listeners[rank]["secret"]):
            raise ConnectionError(f"the segment of rank {rank} is not its memory")
        peer.socket.settimeout(None)


def _seconds_until(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
