"""The connection to the store where all ranks of a job meet.

torch's client waits for minutes in silence, whatever the obstacle. Here a plain socket connects first, repeatedly
until the time limit, because its errors are specific: unknown name, refused, no answer.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from minddp.platform.time_limits import call_with_limit
from minddp.tools.job.place import Place

RETRY_S = 0.5
CONNECT_LIMIT_S = 4.0


@dataclass(eq=False)
class StoreUnreachable(Exception):
    """The obstacle to the connection. `resolved` are the addresses of the store's host."""

    obstacle: str
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
            socket.create_connection((place.address, place.port), min(CONNECT_LIMIT_S, left_s)).close()
            break
        except OSError as error:
            if time.monotonic() >= deadline - RETRY_S:
                raise StoreUnreachable(str(error), resolved) from None
        time.sleep(RETRY_S)
    return hosted or _tcp_store(place.address, place.port, False, limit_s)


def _tcp_store(address: str, port: int, hosts: bool, limit_s: float) -> dist.Store:
    """A client of the store; if this rank `hosts` it, also its server, which listens on all addresses."""
    limit = datetime.timedelta(seconds=limit_s)
    try:
        return call_with_limit(
            lambda: dist.TCPStore(address, port, None, hosts, limit, wait_for_workers=False), limit_s + 1
        )
    except (RuntimeError, TimeoutError) as error:
        fact = "cannot listen" if hosts else "no store answers"
        raise StoreUnreachable(f"{fact}: {first_line(error)}") from error


def resolve(name: str, limit_s: float) -> tuple[str, ...]:
    """The addresses of `name`, best first.

    Raises:
        OSError: it has none, or the resolver does not answer in time.
    """
    found = call_with_limit(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), limit_s)
    return tuple(dict.fromkeys(str(info[4][0]) for info in found))


def first_line(error: BaseException) -> str:
    """The message without the C++ stack that torch appends."""
    return str(error).strip().partition("\n")[0]
