"""The host of a process: do two ranks run on the same machine, and is a process running here?"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from minddp.platform.cores import read_if_there


def boot_id() -> str:
    """The kernel's boot number, equal in all its processes and containers. Empty on systems other than Linux."""
    return read_if_there(Path("/proc/sys/kernel/random/boot_id"))


def host_identity(*namespaces: str) -> str:
    """Equal in two processes if and only if they run on one kernel, in the same of its `namespaces`.

    The host's name takes the place of the kernel's boot number where there is none.
    """
    return " ".join([boot_id() or socket.gethostname(), *map(namespace, namespaces)])


def namespace(kind: str) -> str:
    """The Linux namespace (`net`, `time`, ...) of this process; empty on other systems."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """Its letter in the process table, such as T for one that is stopped; Z if it is gone, or empty if unknown."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return "Z"
    except OSError:  # another user's process, or a system without /proc
        return ""


def is_running(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    return process_state(pid) not in ("Z", "X")
