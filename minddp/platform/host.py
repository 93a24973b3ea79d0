"""The host of a process: its cores, its identity, and the processes that run there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> float:
    """The process's affinity, or its container's quota if that is smaller: often fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(read_if_there(CPU_QUOTA))
    return min(float(cores), quota) if quota else float(cores)


def cpu_quota(setting: str) -> float | None:
    """The number of cores that a control group's `cpu.max` grants; `None` if there is no limit."""
    numbers = setting.split()
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        return None  # "max", or an unknown format
    quota, period = map(int, numbers)
    return quota / period


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


def read_if_there(path: Path) -> str:
    """The text of the file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
