"""Collects the facts about this process and its host. Looks only: it starts, connects and changes nothing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import resource
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

import minddp
from minddp.doctor.facts import GPU, Devices, Machine, Network, RankFacts, Software
from minddp.doctor.interfaces import choose_gloo_address, list_interfaces, network_identity, resolve_own_name
from minddp.doctor.place import Place
from minddp.platform.cores import control_group, read_if_there, usable_cores

# Variables with these beginnings change how ranks compute or talk.
TELLING = (
    "CUBLAS_",
    "CUDA_",
    "GLOO_",
    "MINDDP_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTHONHASHSEED",
    "PYTORCH_",
    "TORCH_",
    "TP_",
)
BY_TORCHRUN = ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)  # set for every rank, to what is the default anyway


def survey(place: Place, environment: Mapping[str, str], store_address: str, name_timeout_s: float) -> RankFacts:
    """All that this rank can tell of itself."""
    boot = _boot_identity()
    interfaces, name_addresses = list_interfaces(), resolve_own_name(name_timeout_s)
    return RankFacts(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        pid=os.getpid(),
        software=Software(versions(), telling(environment)),
        machine=look_at_machine(boot),
        devices=look_at_devices(place.local_rank),
        network=Network(
            identity=network_identity(boot),
            interfaces=interfaces,
            name_addresses=name_addresses,
            gloo_address=choose_gloo_address(environment.get("GLOO_SOCKET_IFNAME"), interfaces, name_addresses),
            store_address=store_address,
        ),
    )


# ---------------------------------------------------------------------- software


def versions() -> dict[str, str]:
    """What has to be equal on all ranks, and what had better be."""
    has_nccl = torch.distributed.is_nccl_available()
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",
        "minddp": _installed("minddp"),
        "minddp's source": _fingerprint(Path(minddp.__file__).parent),
        "NumPy": _installed("numpy"),
        "processor": platform.machine(),
    }


def telling(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of the environment variables that matter."""
    names = sorted(name for name in environment if name.startswith(TELLING) and name not in BY_TORCHRUN)
    return {name: environment[name] for name in names}


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _fingerprint(package: Path) -> str:
    """Eight digits that differ where the code does: two checkouts have one version."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


# ---------------------------------------------------------------------- the host


def look_at_machine(identity: str) -> Machine:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        name=socket.gethostname(),
        identity=identity,
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        load=os.getloadavg()[0],
        memory_bytes=available_memory_bytes(),
        shared_memory_bytes=free_shared_memory_bytes(),
        open_files=limit if limit != resource.RLIM_INFINITY else sys.maxsize,
    )


def available_memory_bytes() -> int:
    """What is free on the host, or left of the container's limit where that is less."""
    free = psutil.virtual_memory().available
    limit = control_group("memory.max", "memory/memory.limit_in_bytes")
    used = control_group("memory.current", "memory/memory.usage_in_bytes")
    return min(free, max(0, int(limit) - int(used))) if limit.isdecimal() and used.isdecimal() else free


def free_shared_memory_bytes(path: str = "/dev/shm") -> int | None:
    try:
        return psutil.disk_usage(path).free
    except OSError:
        return None


def _boot_identity() -> str:
    """Equal in all processes and containers on one kernel."""
    return read_if_there(Path("/proc/sys/kernel/random/boot_id")) or socket.gethostname()


# ---------------------------------------------------------------------- devices


def look_at_devices(local_rank: int | None) -> Devices:
    """The GPUs, without taking any: only of the one that would be this rank's the free memory is asked."""
    driver_is_there = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()
    torch_has_cuda = torch.version.cuda is not None
    if not torch.cuda.is_available():
        return Devices((), driver_is_there, torch_has_cuda)
    num_gpus = torch.cuda.device_count()
    own = local_rank if local_rank is not None and local_rank < num_gpus else 0
    gpus = []
    for index in range(num_gpus):
        properties = torch.cuda.get_device_properties(index)
        free_bytes = torch.cuda.mem_get_info(index)[0] if index == own else None
        uuid = str(getattr(properties, "uuid", f"{socket.gethostname()} {index}"))
        gpus.append(GPU(properties.name, uuid, properties.total_memory, free_bytes))
    return Devices(tuple(gpus), driver_is_there, torch_has_cuda)
