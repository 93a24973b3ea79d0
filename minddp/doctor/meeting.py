"""Getting to the store: the first thing that every rank does, and the first that goes wrong.

torch's own client waits for minutes in silence for any obstacle. Here a plain socket knocks first, over and over
until somebody opens, because a closed door says more to a socket: unknown name, refused, no answer, no route.
"""

from __future__ import annotations

import datetime
import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from minddp.doctor.interfaces import resolve
from minddp.doctor.patience import TimeUp, patiently
from minddp.doctor.place import Place

Obstacle = Literal["unknown name", "refused", "no answer", "no route", "no store", "port in use", "other"]

_KNOCK_EVERY_S = 0.5
_KNOCK_TIMEOUT_S = 4.0
_HANDSHAKE_TIMEOUT_S = 10.0  # takes milliseconds once somebody has opened


@dataclass(frozen=True)
class Meeting:
    """The store, the end of the connection to it that is here, and how long it took to get there."""

    store: dist.Store
    own_address: str
    took_s: float


@dataclass(frozen=True)
class Attempt:
    """What stood in the way to the store. `resolved` is what its address resolves to on this host."""

    place: Place
    obstacle: Obstacle
    detail: str
    resolved: tuple[str, ...]
    waited_s: float


class CannotMeet(Exception):
    def __init__(self, attempt: Attempt):
        self.attempt = attempt
        super().__init__(f"{attempt.place.endpoint}: {attempt.obstacle}, {attempt.detail}")


class _NoEntry(Exception):
    def __init__(self, obstacle: Obstacle, detail: str):
        self.obstacle: Obstacle = obstacle
        self.detail = detail


def open_store(
    place: Place, timeout_s: float, waiting: Callable[[str, float], None] = lambda why, waited: None
) -> Meeting:
    """The store at the place's endpoint, hosted here if it falls to this rank.

    `waiting` is called over and over with the reason and the seconds waited so far.

    Raises:
        CannotMeet: it could not be had within `timeout_s` or so.
    """
    began = time.monotonic()
    resolved: list[str] = []
    try:
        hosted = _host(place, timeout_s) if place.hosts_store else None
        own_address = _knock(place, resolved, began + timeout_s, waiting)
        store = hosted or _enter(place, timeout_s)
    except _NoEntry as no_entry:
        waited_s = time.monotonic() - began
        raise CannotMeet(Attempt(place, no_entry.obstacle, no_entry.detail, tuple(resolved), waited_s)) from None
    return Meeting(store, own_address, time.monotonic() - began)


def _host(place: Place, timeout_s: float) -> dist.Store:
    """The store, listening at all addresses of this host. Whether the endpoint is one of them shows by knocking."""
    try:
        return _tcp_store("localhost", place.port, True, timeout_s)
    except RuntimeError as error:
        in_use = "EADDRINUSE" in str(error)
        raise _NoEntry("port in use" if in_use else "other", _first_line(error)) from error
    except TimeUp as error:
        raise _NoEntry("other", str(error)) from error


def _knock(place: Place, resolved: list[str], deadline: float, waiting: Callable[[str, float], None]) -> str:
    """Connect to the endpoint and hang up; returns our end's address. Fills in what the name resolves to."""
    began = time.monotonic()
    while True:
        try:
            left_s = max(0.1, deadline - time.monotonic())
            resolved[:] = resolve(place.address, left_s)
            with socket.create_connection((resolved[0], place.port), min(_KNOCK_TIMEOUT_S, left_s)) as door:
                return str(door.getsockname()[0])
        except OSError as error:
            no_entry = _NoEntry(classify(error), str(error))
        if time.monotonic() >= deadline - _KNOCK_EVERY_S:
            raise no_entry
        waiting(no_entry.obstacle, time.monotonic() - began)
        time.sleep(_KNOCK_EVERY_S)


def _enter(place: Place, timeout_s: float) -> dist.Store:
    """Shake hands with the store. Somebody has opened, so it is quick; unless it is not a store who opened."""
    limit_s = min(timeout_s, _HANDSHAKE_TIMEOUT_S)
    try:
        return _tcp_store(place.address, place.port, False, limit_s)
    except (RuntimeError, TimeUp) as error:
        raise _NoEntry("no store", _first_line(error)) from error


def _tcp_store(address: str, port: int, hosts: bool, timeout_s: float) -> dist.Store:
    limit = datetime.timedelta(seconds=timeout_s)
    return patiently(
        lambda: dist.TCPStore(address, port, None, hosts, limit, wait_for_workers=False), timeout_s + 1
    )


def classify(error: OSError) -> Obstacle:
    """What a socket's error says of the way to the other side."""
    if isinstance(error, socket.gaierror):
        return "unknown name"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError):
        return "no answer"
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return "no route"
    return "other"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
