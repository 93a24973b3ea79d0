"""The fact sheet of a rank, its host and its network.

Collecting it only reads: no process is started, no connection opened, no setting changed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

import minddp
from minddp.platform import streams
from minddp.platform.host import host_identity
from minddp.tools.job.place import Place
from minddp.tools.job.store_connection import resolve

# Environment variables with these prefixes change how ranks compute or communicate.
PREFIXES = ("CUBLAS_", "CUDA_", "GLOO_", "MINDDP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TP_")
SET_BY_TORCHRUN = ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)  # to its default


@dataclass(frozen=True)
class FactSheet:
    """Ranks with equal `host_identity` share memory; with equal `network_identity`, network interfaces.

    `shared_memory_bytes` is free space in /dev/shm, `None` if there is none. `gpu_uuid` is empty if torch has no
    GPU for the rank. `interfaces` are those that are up, each with its addresses, IPv4 first. `gloo_address` is
    where gloo will listen, `None` if it cannot.
    """

    pid: int
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    host: str
    host_identity: str
    shared_memory_bytes: int | None
    gpu_uuid: str
    network_identity: str
    interfaces: Mapping[str, Sequence[str]]
    gloo_address: str | None


Sheets = Mapping[int, FactSheet]


def collect(place: Place, environment: Mapping[str, str], limit_s: float) -> FactSheet:
    """The fact sheet of this process; the host's own name is resolved within `limit_s`."""
    interfaces = list_interfaces()
    gpu = own_gpu_index(place.local_rank)
    properties = None if gpu is None else streams.properties(torch.device("cuda", gpu))
    return FactSheet(
        pid=os.getpid(),
        versions=versions(),
        environment=relevant(environment),
        host=socket.gethostname(),
        host_identity=host_identity(),
        shared_memory_bytes=psutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        gpu_uuid=str(getattr(properties, "uuid", f"{socket.gethostname()} {gpu}")) if properties else "",
        network_identity=host_identity("net"),
        interfaces=interfaces,
        gloo_address=choose_gloo_address(environment.get("GLOO_SOCKET_IFNAME"), interfaces, limit_s),
    )


def versions() -> dict[str, str]:
    """Versions that should be equal on all ranks. minddp's has a hash of its code, which may be a checkout."""
    code = hashlib.sha256()
    for path in sorted(Path(minddp.__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": ".".join(map(str, streams.nccl_version() or ("none",))),
        "minddp": f"{importlib.metadata.version('minddp')} ({code.hexdigest()[:8]})",
        "NumPy": importlib.metadata.version("numpy"),
    }


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES) and name not in SET_BY_TORCHRUN
    }


def own_gpu_index(local_rank: int | None) -> int | None:
    """The number in torch of the GPU with this rank's local number; of the only visible GPU, if there is one."""
    num_gpus = streams.num_devices("cuda")
    index = 0 if num_gpus == 1 else local_rank
    return index if index is not None and index < num_gpus else None


def list_interfaces() -> dict[str, list[str]]:
    states = psutil.net_if_stats()
    found = {}
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        families = (socket.AF_INET, socket.AF_INET6)  # in this order
        listed = [a.address.partition("%")[0] for family in families for a in addresses if a.family == family]
        if listed and name in states and states[name].isup:
            found[name] = listed
    return found


def is_loopback(address: str | None) -> bool:
    return address is not None and (address.startswith("127.") or address == "::1")


def outward(interfaces: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The interfaces that other hosts may reach, each with its first address."""
    return {name: addresses[0] for name, addresses in interfaces.items() if not is_loopback(addresses[0])}


def choose_gloo_address(wanted: str | None, interfaces: Mapping[str, Sequence[str]], limit_s: float) -> str | None:
    """Where gloo will listen; `None` if the interface that is `wanted` does not exist or is down.

    As in torch's `ProcessGroupGloo`: at the interface that GLOO_SOCKET_IFNAME names (the first of several); else at
    the address of the host's own name, if it can be bound; else at the loopback.
    """
    if wanted:
        return next(iter(interfaces.get(wanted.split(",")[0], ())), None)
    try:
        addresses = resolve(socket.gethostname(), limit_s)
    except OSError:
        addresses = ()
    for address in addresses:
        with suppress(OSError):
            listen(address).close()
            return address
    return "127.0.0.1"


def listen(address: str, backlog: int = 1) -> socket.socket:
    """A socket that listens at `address`, at a port that the system chooses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)
