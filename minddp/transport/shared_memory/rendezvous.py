"""How the ranks of a group find out that they share one host, and get connected: all of them, or none.

The process group carries an introduction from each rank: which machine it is on, and where it listens. Then each
pair is connected by a Unix socket, and proves that it can share memory by doing so. The process group also carries
the outcome, so that if one rank cannot, all know and go another way.

Sockets listen in the abstract namespace: no file, and gone with the process. Anybody on the machine may knock
there; only who knows the secret from the introduction is let in.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch

from minddp.transport.shared_memory import messages, segments

MESSAGE_BYTES = 1024  # through the process group; room for the longest obstacle, if all of it must be escaped
LONGEST_OBSTACLE = 150  # characters
LONGEST_QUEUE = 1024  # of ranks that knock at the same time
SECRET_BYTES = 16
_KNOCK = struct.Struct(f"<{SECRET_BYTES}sq")  # the secret of the one who listens, the rank of the one who knocks


class Meeting(Protocol):
    """As much of a `Transport` as ranks need to find each other."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]: ...


class CannotConnect(Exception):
    """Why this group cannot share memory: the same on every rank."""


@dataclass(frozen=True)
class Peer:
    """Another rank. `process` is a descriptor that becomes readable when its process ends, if there are such."""

    rank: int
    socket: socket.socket
    process: int | None

    def close(self) -> None:
        self.socket.close()
        if self.process is not None:
            os.close(self.process)


class _Introduction(TypedDict):
    machine: str  # empty if its system cannot share memory in this way
    address: str  # hexadecimal, as is
    secret: str


def connect(group: Meeting, timeout_s: float) -> dict[int, Peer]:
    """A connection to each other rank of `group`. Collective.

    Raises:
        CannotConnect: on every rank, and for the same reason, if any two ranks cannot share memory.
    """
    deadline = time.monotonic() + timeout_s
    peers: dict[int, Peer] = {}
    obstacle = ""
    with _listening() as listener:
        ours = _introduce(listener)
        everyone: list[_Introduction] = gather_words(group, ours)
        _require_one_machine(everyone)
        assert listener is not None, "checked with the machines"
        try:
            for rank in range(group.rank):
                peers[rank] = _knock(rank, everyone[rank], group.rank, deadline)
            while len(peers) < group.world_size - 1:
                peer = _let_in(listener, ours, deadline)
                peers[peer.rank] = peer
            _prove_that_memory_is_shared(peers, everyone, group.rank, deadline)
        except OSError as error:
            obstacle = f"rank {group.rank} cannot share memory with the others: {error}"[:LONGEST_OBSTACLE]
        obstacles = [outcome for outcome in gather_words(group, obstacle) if outcome]
    if obstacles:
        for peer in peers.values():
            peer.close()
        raise CannotConnect(obstacles[0])
    return peers


# ---------------------------------------------------------------------- introductions, through the process group


@contextmanager
def _listening() -> Iterator[socket.socket | None]:
    if not segments.is_supported():
        yield None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel chooses an abstract address
        listener.listen(LONGEST_QUEUE)
        yield listener


def _introduce(listener: socket.socket | None) -> _Introduction:
    if listener is None:
        return _Introduction(machine="", address="", secret="")
    return _Introduction(
        machine=machine(),
        address=listener.getsockname().hex(),
        secret=secrets.token_hex(SECRET_BYTES),
    )


def machine() -> str:
    """What ranks on one host have in common, and only they; empty on a system that cannot share memory."""
    if not segments.is_supported():
        return ""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink("/proc/self/ns/net")  # an abstract address is valid within one
    return f"{kernel} {namespace}"


def gather_words(group: Meeting, ours: object) -> list[Any]:
    """What each rank has to say, in rank order."""
    text = bytearray(json.dumps(ours).encode().ljust(MESSAGE_BYTES))
    return [
        json.loads(bytes(said.tolist())) for said in group.all_gather(torch.frombuffer(text, dtype=torch.uint8))
    ]


def _require_one_machine(everyone: Sequence[_Introduction]) -> None:
    for rank, introduction in enumerate(everyone):
        if not introduction["machine"]:
            raise CannotConnect(f"rank {rank} runs on a system that cannot do it as Linux does")
        if introduction["machine"] != everyone[0]["machine"]:
            raise CannotConnect(
                f"rank {rank} is on another host than rank 0, or in a container with its own network"
            )


# ---------------------------------------------------------------------- connections, pair by pair


def _knock(rank: int, introduction: _Introduction, our_rank: int, deadline: float) -> Peer:
    """Connect to a lower rank."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.settimeout(_seconds_until(deadline))
    door.connect(bytes.fromhex(introduction["address"]))
    door.send(_KNOCK.pack(bytes.fromhex(introduction["secret"]), our_rank))
    return _peer(rank, door)


def _let_in(listener: socket.socket, ours: _Introduction, deadline: float) -> Peer:
    """Wait for a higher rank; turn strangers away."""
    while True:
        listener.settimeout(_seconds_until(deadline))
        door, _ = listener.accept()
        door.settimeout(_seconds_until(deadline))
        knock = door.recv(_KNOCK.size)
        if len(knock) == _KNOCK.size:
            secret, rank = _KNOCK.unpack(knock)
            if secrets.compare_digest(secret, bytes.fromhex(ours["secret"])):
                return _peer(rank, door)
        door.close()


def _peer(rank: int, connection: socket.socket) -> Peer:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * messages.LARGEST_TOLD_BYTES)  # sent as a whole
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, _, _ = struct.unpack("3i", credentials)
    return Peer(rank, connection, _descriptor_of_process(process))


def _descriptor_of_process(process: int) -> int | None:
    """`None` where processes have no descriptors, or it runs in a container whose processes are not seen here."""
    if process == 0 or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(process)
    except OSError:
        return None


def _prove_that_memory_is_shared(
    peers: dict[int, Peer], everyone: list[_Introduction], our_rank: int, deadline: float
) -> None:
    """Show each peer our secret in memory, and find theirs in memory of theirs."""
    descriptor = segments.create(SECRET_BYTES)
    try:
        os.pwrite(descriptor, bytes.fromhex(everyone[our_rank]["secret"]), 0)
        announcement = messages.encode(messages.SegmentMade(-1, SECRET_BYTES))
        for peer in peers.values():
            messages.send(peer.socket, announcement, [descriptor], timeout_s=_seconds_until(deadline))
    finally:
        os.close(descriptor)
    for rank, peer in peers.items():
        if not messages.await_event(peer.socket, select.POLLIN, _seconds_until(deadline)):
            raise TimeoutError(f"rank {rank} has shown nothing in time")
        _, descriptors = messages.receive(peer.socket)
        if not descriptors:
            raise ConnectionError(f"rank {rank} has hung up")
        if segments.attach(descriptors[0], SECRET_BYTES)[:] != bytes.fromhex(everyone[rank]["secret"]):
            raise ConnectionError(f"what rank {rank} shows is not its memory")


def _seconds_until(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
