"""Which host a process runs on: the one source for everything that asks "are we on the same machine?"."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from minddp.platform.cores import read_if_there

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The running kernel's own number: equal in all its processes and containers. Empty where there is none."""
    return read_if_there(BOOT_ID)


def host_identity(*namespaces: str) -> str:
    """Equal in two processes if and only if they run on one kernel, and in the same of its `namespaces`.

    The host's name takes the place of the kernel's number where that is not known.
    """
    return " ".join([boot_id() or socket.gethostname(), *map(namespace, namespaces)])


def namespace(kind: str) -> str:
    """The Linux namespace (`net`, `time`, ...) of this process; empty on other systems.

    Processes in different namespaces of one kernel do not share what the namespace holds.
    """
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""
