"""Network interfaces: which there are, which gloo and NCCL will take, and what a name resolves to."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import psutil

from minddp.doctor.facts import Interface
from minddp.doctor.patience import TimeUp, patiently


def list_interfaces() -> dict[str, Interface]:
    """All interfaces of this host (or container) that have an address."""
    states = psutil.net_if_stats()
    found = {}
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        kept = sorted(
            (address.family != socket.AF_INET, address.address.partition("%")[0])
            for address in addresses
            if address.family in (socket.AF_INET, socket.AF_INET6)
        )
        if kept:
            found[name] = Interface(tuple(address for _, address in kept), name in states and states[name].isup)
    return found


def outward(interfaces: Mapping[str, Interface]) -> dict[str, str]:
    """Those that other hosts may reach, and the first address of each."""
    return {
        name: interface.addresses[0]
        for name, interface in interfaces.items()
        if interface.is_up and interface.addresses and not is_loopback(interface.addresses[0])
    }


def is_loopback(address: str) -> bool:
    """Whether only the host itself can be reached there."""
    return address.startswith("127.") or address == "::1"


def resolve(name: str, timeout_s: float) -> tuple[str, ...]:
    """The addresses of `name`, best first.

    Raises:
        OSError: it has none, or nobody says in time.
    """
    try:
        found = patiently(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), timeout_s)
    except TimeUp:
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer within {timeout_s:g} s") from None
    return tuple(dict.fromkeys(str(info[4][0]) for info in found))


def resolve_own_name(timeout_s: float) -> tuple[str, ...]:
    """The same of this host's name; empty if it has no address."""
    try:
        return resolve(socket.gethostname(), timeout_s)
    except OSError:
        return ()


def choose_gloo_address(
    wanted: str | None, interfaces: Mapping[str, Interface], name_addresses: Sequence[str]
) -> str | None:
    """Where gloo will listen; `None` if the interface that is `wanted` does not exist.

    As torch does it (`ProcessGroupGloo`): at the interface that GLOO_SOCKET_IFNAME names (the first of several);
    else at the address of the host's own name, if it can be bound here; else at the loopback.
    """
    if wanted:
        interface = interfaces.get(wanted.split(",")[0])
        return interface.addresses[0] if interface else None
    return next((address for address in name_addresses if _can_bind(address)), "127.0.0.1")


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def match_nccl_interfaces(pattern: str, names: Sequence[str]) -> list[str]:
    """Which of the interfaces NCCL_SOCKET_IFNAME allows.

    A comma separates names, of which the beginning has to match; `=` in front asks for all of the name, and `^`
    excludes (NCCL's documentation of the variable).
    """
    if pattern.startswith("^"):
        excluded = match_nccl_interfaces(pattern[1:], names)
        return [name for name in names if name not in excluded]
    wanted = [word for word in pattern.removeprefix("=").split(",") if word]
    if pattern.startswith("="):
        return [name for name in names if name in wanted]
    return [name for name in names if name.startswith(tuple(wanted))]


def network_identity(boot: str) -> str:
    """Equal in processes that see the same interfaces: those of one kernel (`boot`) and network namespace."""
    try:
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # not Linux
        return boot
