"""A rank's place in the job, and its connection to the store where all ranks meet.

torch's client waits for minutes in silence, whatever the obstacle. Here a plain socket connects first, repeatedly
until the time limit, because its errors are specific: unknown name, refused, no answer.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from minddp.platform import wording
from minddp.platform.time_limits import Unfinished, call_with_limit

Obstacle = Literal["unknown name", "refused", "no answer", "no store", "cannot listen"]

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # not MASTER_ADDR alone, which a .bashrc may set
RETRY_S = 0.5
CONNECT_LIMIT_S = 4.0
HANDSHAKE_LIMIT_S = 10.0


class UsageError(ValueError):
    """Options or environment variables cannot work; the message has the remedy."""


@dataclass(frozen=True)
class Place:
    """The rank of this process and the address of the store. `restarts` counts those of the launcher.

    `hosts_store` is true on rank 0, except under torchrun, whose agent hosts the store.
    """

    rank: int
    world_size: int
    address: str
    port: int
    local_rank: int | None = None
    hosts_store: bool = False
    restarts: int = 0

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.port}"


def place_of(environment: Mapping[str, str]) -> Place | None:
    """The place that a launcher has given to this process; `None` if no launcher has started it.

    Raises:
        UsageError: variables are missing or impossible.
    """
    if not any(name in environment for name in OF_A_RANK):
        return None
    numbers = [environment.get(name, "missing") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    if (
        "MASTER_ADDR" not in environment
        or not all(map(str.isdecimal, numbers))
        or int(numbers[0]) >= int(numbers[1])
    ):
        found = wording.joined([f"{name}={environment.get(name, '')}" for name in REQUIRED])
        raise UsageError(
            f"This would be one rank of a job, but its environment has {found}. Set all of them, with RANK from 0 "
            f"to WORLD_SIZE - 1, as torchrun does; or unset {wording.joined(OF_A_RANK)}, and minddp doctor starts "
            f"its own ranks."
        )
    rank, world_size, port = map(int, numbers)
    return Place(
        rank,
        world_size,
        environment["MASTER_ADDR"],
        port,
        int(environment["LOCAL_RANK"]) if "LOCAL_RANK" in environment else None,
        hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


@dataclass(eq=False)
class StoreUnreachable(Exception):
    """What prevents the connection to the store. `resolved` are the addresses of its host's name."""

    obstacle: Obstacle
    detail: str
    resolved: Sequence[str] = ()


def open_store(place: Place, limit_s: float) -> dist.Store:
    """The store, hosted here if the place says so.

    Raises:
        StoreUnreachable: there is no connection after about `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    hosted = _tcp_store("localhost", place.port, True, limit_s) if place.hosts_store else None
    resolved: tuple[str, ...] = ()
    while True:
        try:
            left_s = max(0.1, deadline - time.monotonic())
            resolved = resolve(place.address, left_s)
            socket.create_connection((resolved[0], place.port), min(CONNECT_LIMIT_S, left_s)).close()
            break
        except OSError as error:
            if time.monotonic() >= deadline - RETRY_S:
                raise StoreUnreachable(obstacle_of(error), str(error), resolved) from None
        time.sleep(RETRY_S)
    return hosted or _tcp_store(place.address, place.port, False, min(limit_s, HANDSHAKE_LIMIT_S))


def _tcp_store(address: str, port: int, hosts: bool, limit_s: float) -> dist.Store:
    """A client of the store; if this rank `hosts` it, also its server, which listens on all addresses."""
    limit = datetime.timedelta(seconds=limit_s)
    try:
        return call_with_limit(
            lambda: dist.TCPStore(address, port, None, hosts, limit, wait_for_workers=False), limit_s + 1
        )
    except (RuntimeError, Unfinished) as error:
        raise StoreUnreachable("cannot listen" if hosts else "no store", first_line(error)) from error


def resolve(name: str, limit_s: float) -> tuple[str, ...]:
    """The addresses of `name`, best first.

    Raises:
        OSError: it has none, or the resolver does not answer in time.
    """
    try:
        found = call_with_limit(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), limit_s)
    except Unfinished as error:
        raise socket.gaierror(socket.EAI_AGAIN, str(error)) from None
    return tuple(dict.fromkeys(str(info[4][0]) for info in found))


def first_line(error: BaseException) -> str:
    """The message without the C++ stack that torch appends."""
    return str(error).strip().partition("\n")[0]


def obstacle_of(error: OSError) -> Obstacle:
    if isinstance(error, socket.gaierror):
        return "unknown name"
    return "refused" if isinstance(error, ConnectionRefusedError) else "no answer"
