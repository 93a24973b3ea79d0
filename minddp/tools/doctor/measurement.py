"""The fact sheet of a rank, and measurements on all ranks, some seconds in all."""

from __future__ import annotations

import datetime
import importlib.metadata
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from minddp.platform import streams
from minddp.platform.store import Messages
from minddp.platform.time_limits import call_with_limit
from minddp.tools.forecast.gradient_clock import clock_of
from minddp.tools.forecast.link import Link, measure_link
from minddp.tools.job.store_connection import first_line, resolve
from minddp.transport import open_transport

T = TypeVar("T")
# Environment variables with these prefixes change how ranks compute or communicate.
PREFIXES = ("CUBLAS_", "CUDA_", "GLOO_", "MINDDP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TP_")
MARGIN_S = 5.0  # for the answer of a rank that has used up its time


@dataclass(frozen=True)
class FactSheet:
    """The measurements of one rank, which rank 0 compares."""

    host: str
    settings: Mapping[str, str]  # versions, the device and environment variables
    address: str  # where gloo listens


Sheets = Mapping[int, FactSheet]  # by rank


def collect(device: torch.device, environment: Mapping[str, str], limit_s: float) -> FactSheet:
    """The fact sheet of this process."""
    settings = {
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": ".".join(map(str, streams.nccl_version() or ("none",))),
        "minddp": importlib.metadata.version("minddp"),
        "device": device.type,
    }
    settings |= {name: value for name, value in sorted(environment.items()) if name.startswith(PREFIXES)}
    interface = environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return FactSheet(socket.gethostname(), settings, address_of_gloo(interface, limit_s))


def address_of_gloo(interface: str, limit_s: float) -> str:
    """As torch finds it: that of `interface`, else of the host's own name if it can be bound, else loopback."""
    addresses = [one.address for one in psutil.net_if_addrs().get(interface, ())]
    if not interface:
        with suppress(OSError):
            addresses += resolve(socket.gethostname(), limit_s)
        addresses.append("127.0.0.1")
    for address in addresses:
        with suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            socket.create_server((address, 0), family=family).close()
            return address
    return "no address"


def run_on_all(messages: Messages, part: Callable[[], T], limit_s: float) -> tuple[T | None, dict[int, str]]:
    """Run `part` on every rank, within `limit_s`. Returns this rank's value, and the errors of all, by rank."""
    value, error, deadline = None, "", time.monotonic() + limit_s
    try:
        value = call_with_limit(part, limit_s)
    except Exception as raised:
        error = f"{type(raised).__name__}: {first_line(raised)}"
    messages.post(error, "measure")
    answers = messages.gather("measure", limit_s=deadline - time.monotonic() + MARGIN_S)
    errors = {rank: answers.get(rank, "no answer") for rank in range(messages.world_size)}
    return value, {rank: error for rank, error in errors.items() if error}


def measure(messages: Messages, device: torch.device, limit_s: float) -> Link:
    """Make the default process group, check a sum, and measure all-reduces."""
    if device.type == "cuda":
        torch.get_device_module(device).set_device(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=dist.PrefixStore(f"{messages.topic}/group", messages.store),
        rank=messages.rank,
        world_size=messages.world_size,
        timeout=datetime.timedelta(seconds=limit_s),
    )
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if total.item() != messages.world_size:
        raise RuntimeError(f"ones on {messages.world_size} ranks added up to {total.item():g}")
    transport = open_transport("auto", dist.distributed_c10d._get_default_group(), device)
    return measure_link(transport, device, clock_of([device]))
