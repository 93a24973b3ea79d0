"""Hosts on one machine: network namespaces with a cable between them whose rate is limited.

A network namespace has interfaces, addresses and abstract sockets of its own, as a host has; a process in it
reaches another one only through the cable. The cable is a pair of virtual interfaces, each with a token bucket that
lets bytes leave at `rate`: full duplex, as Ethernet. Unlike separate hosts, these share processors, memory and
files, and the latency of the cable is that of the kernel, some tens of microseconds.

Needs Linux, root (or CAP_NET_ADMIN and CAP_SYS_ADMIN), and the commands `ip` and `tc`.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
HOSTS = 2
_PORT = 29500
_CLONE_NEWNET = 0x40000000
_BURST_S = 0.001  # the bytes that may leave at once are those that the cable carries in this time,
_LEAST_BURST_BYTES = 2 * 64 * 1024  # and at least two of the largest pieces that TCP sends
_QUEUE_S = 0.02  # how long the queue in front of the cable may grow before something is dropped
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Host:
    """A namespace; `address` is reached from the others through their `INTERFACE`."""

    namespace: str
    address: str

    def enter(self) -> None:
        """Move the calling thread there, and those that it will start: call it before there are any others."""
        with Path("/run/netns", self.namespace).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {self.namespace}")


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[Host, Host]]:
    """Two hosts and a cable of `rate`, such as "1gbit". They are removed at the end, whatever happens.

    Raises:
        ValueError: a rate that cannot be read.
        RuntimeError: this process cannot make them; the message gives the cause.
    """
    bytes_per_second(rate)
    name = f"minddp-{os.getpid()}-{secrets.token_hex(2)}"
    hosts = Host(f"{name}-0", "10.77.0.1"), Host(f"{name}-1", "10.77.0.2")
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        here, there = (["name", INTERFACE, "netns", host.namespace] for host in hosts)
        _run("ip", "link", "add", *here, "type", "veth", "peer", *there)
        for host in hosts:
            _plug_in(host, rate)
        yield hosts
    finally:
        for host in hosts:  # the cable goes with them
            with suppress(RuntimeError):  # it may not have come so far
                _run("ip", "netns", "delete", host.namespace)


def settle(hosts: Sequence[Host], ranks_per_host: int, rank: int) -> str:
    """Move to the rank's host; returns the init_method."""
    hosts[rank // ranks_per_host].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return f"tcp://{hosts[0].address}:{_PORT}"


def why_there_can_be_none() -> str | None:
    """The reason that this process cannot make hosts, in a line; `None` if it can."""
    try:
        with two_hosts("1gbit"):
            return None
    except RuntimeError as error:
        return str(error)


def bytes_per_second(rate: str) -> float:
    """The value of a rate as `tc` takes it: "1gbit", "100mbit"; `ValueError` for anything else."""
    number, unit = rate[:-4], rate[-4:].lower()
    with suppress(ValueError):
        if unit in _UNITS and 0 < float(number) < float("inf"):
            return float(number) * _UNITS[unit] / 8
    raise ValueError(f'A rate is a number of {", ".join(_UNITS)}, such as "1gbit", but got {rate!r}.')


def bucket_of(rate: str) -> list[str]:
    """The token bucket of a cable, as arguments of `tc`."""
    bytes_per_s = bytes_per_second(rate)
    burst_bytes = int(max(_BURST_S * bytes_per_s, _LEAST_BURST_BYTES))
    size = ["rate", f"{int(bytes_per_s * 8)}bit", "burst", str(burst_bytes)]
    return ["tbf", *size, "latency", f"{_QUEUE_S * 1e3:g}ms"]


def limit_rate(rate: str) -> None:
    """Let this process's host send at `rate` from now on; both ends of the cable have a bucket of their own."""
    _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", *bucket_of(rate))


def _plug_in(host: Host, rate: str) -> None:
    inside = ["ip", "netns", "exec", host.namespace]
    _run(*inside, "ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _run(*inside, "ip", "link", "set", "lo", "up")
    _run(*inside, "ip", "link", "set", INTERFACE, "up")
    _run(*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", *bucket_of(rate))


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        raise RuntimeError(f"no command `{command[0]}` here") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"`{' '.join(command)}`: {error.stderr.strip()}") from None
