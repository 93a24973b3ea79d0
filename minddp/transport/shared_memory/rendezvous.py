"""How the ranks of a group find out that they share a host, and connect: all of them, or none.

Each rank sends the name of its host, the address at which it listens, and the outcome through gloo. Each pair of
ranks connects by a Unix socket. Sockets listen in the abstract namespace: there is no file, and the address ends
with the process. Any process of the machine can see it and connect; only one that knows the listener's token, which
the ranks of the group alone receive, is accepted. No rank stops listening before all are connected, so nothing else
can have its address.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from minddp.platform.host import host_identity
from minddp.transport.shared_memory import segments
from minddp.transport.shared_memory.control_block import ORDERS_WRITES, ControlBlock
from minddp.transport.shared_memory.host_communicator import HostCommunicator
from minddp.transport.shared_memory.peer_sockets import Peer, connect
from minddp.transport.shared_memory.segments import Segment
from minddp.transport.spin_wait import spin_wait_among

if TYPE_CHECKING:
    from minddp.transport.hierarchical import Lane

GATHERED_BYTES = 1024  # per rank; room for the longest error, even if every character is escaped
MAX_ERROR_CHARACTERS = 150
LISTEN_BACKLOG = 1024
TOKEN_BYTES = 16
CONNECT_LIMIT_S = 30.0

#: The values of all ranks, in rank order, from that of this rank. Collective.
Gather = Callable[[object], list[Any]]


class CannotConnect(Exception):
    """The reason why this group cannot share memory: the same on every rank."""


def name_of_host() -> str:
    """Equal on ranks of one host and network namespace, the scope of an address. Empty unless on Linux and x86."""
    return host_identity("net") if hasattr(os, "memfd_create") and ORDERS_WRITES else ""


def gather_through(gloo: Any) -> Gather:
    """Values of all ranks by a collective, which cannot meet the messages of an earlier job as a store could."""

    def gather(value: object) -> list[Any]:
        text = torch.frombuffer(bytearray(json.dumps(value).encode().ljust(GATHERED_BYTES)), dtype=torch.uint8)
        gathered = [torch.empty_like(text) for _ in range(gloo.size())]
        gloo.allgather([gathered], [text]).wait()
        return [json.loads(bytes(one.tolist())) for one in gathered]

    return gather


def gather_hosts(gather: Gather, name_here: str) -> list[str]:
    """The names of all ranks' hosts. Collective. Raises `CannotConnect` if a host has no name."""
    names: list[str] = gather(name_here)
    if "" in names:
        raise CannotConnect(f"rank {names.index('')} does not run on Linux on an x86 processor")
    return names


def connect_ranks(
    gather: Gather, rank: int, ranks: Sequence[int], make_lane: Callable[[], Lane | None] = lambda: None
) -> HostCommunicator:
    """The connected `ranks`, those of this host. Collective among all ranks of the group.

    Args:
        make_lane: connects this rank to other hosts, if there are any. Collective; may raise a RuntimeError.

    Raises:
        CannotConnect: on every rank, with the same reason, if any two ranks of a host cannot share memory, or hosts
            cannot connect.
    """
    peers: dict[int, Peer] = {}
    error, host, lane, address, ours = "", None, None, None, ranks.index(rank)
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind("")  # the kernel chooses an abstract address
            listener.listen(LISTEN_BACKLOG)
            address = (listener.getsockname().hex(), secrets.token_hex(TOKEN_BYTES))
        except OSError as reason:
            error = f"rank {rank} cannot share memory with the others: {reason}"
        listeners = gather(address)
        if None in listeners:
            raise CannotConnect(next(filter(None, gather(error[:MAX_ERROR_CHARACTERS]))))
        addresses = {local: (bytes.fromhex(listeners[r][0]), listeners[r][1]) for local, r in enumerate(ranks)}
        try:
            connect(addresses, listener, ours, CONNECT_LIMIT_S, peers)
            control = _share_control_block(peers, ours)
        except OSError as reason:
            error = f"rank {rank} cannot share memory with the others: {reason}"
            _close(peers)
        try:
            lane = make_lane()
        except RuntimeError as reason:
            error = error or f"rank {rank} cannot connect to the other hosts: {reason}"
        if not error:
            try:
                host = HostCommunicator(ours, peers, control, ranks, spin_wait_among(len(listeners)), lane)
            except (OSError, RuntimeError) as reason:  # no descriptor or thread is left
                error = f"rank {rank} cannot share memory with the others: {reason}"
        errors = [error for error in gather(error[:MAX_ERROR_CHARACTERS]) if error]
    if host is None or errors:
        if host is not None:
            host.end()
        else:
            _close(peers)
            if lane is not None:
                lane.close()
        raise CannotConnect(errors[0])
    return host


def _close(peers: dict[int, Peer]) -> None:
    while peers:
        peers.popitem()[1].close()


def _share_control_block(peers: Mapping[int, Peer], rank: int) -> Segment:
    """Rank 0 makes it, and sends it to the others."""
    nbytes = ControlBlock.nbytes(len(peers) + 1)
    if rank == 0:
        descriptor = segments.create(nbytes)
        for peer in peers.values():
            socket.send_fds(peer.socket, [b"control block"], [descriptor])
    else:
        peers[0].socket.settimeout(CONNECT_LIMIT_S)
        _, descriptors, _, _ = socket.recv_fds(peers[0].socket, 100, 1)
        peers[0].socket.settimeout(None)
        if not descriptors:
            raise OSError("rank 0 has no memory to share")
        descriptor = descriptors[0]
    try:
        return segments.attach(descriptor, nbytes, number=-1)
    finally:
        os.close(descriptor)
