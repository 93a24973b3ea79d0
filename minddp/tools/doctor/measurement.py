"""The fact sheet of a rank, and measurements on all ranks, some seconds in all."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

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
MARGIN_S = 5.0  # for ranks that wait for a rank that waits for others
PRODUCTS, WIDTH = 80, 512


@dataclass(frozen=True)
class FactSheet:
    """`endpoint` is an address and port at which the rank listens where gloo would; `("", 0)` if gloo cannot."""

    host: str
    pid: int
    settings: Mapping[str, str]  # versions, the device and environment variables
    endpoint: tuple[str, int]


Sheets = Mapping[int, FactSheet]  # by rank


def collect(device: torch.device, environment: Mapping[str, str], server: socket.socket | None) -> FactSheet:
    """The fact sheet of this process."""
    settings = {
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda or "none"),
        "NCCL": ".".join(map(str, streams.nccl_version() or ("none",))),
        "minddp": importlib.metadata.version("minddp"),
        "device": device.type,
    }
    settings |= {name: value for name, value in sorted(environment.items()) if name.startswith(PREFIXES)}
    endpoint = ("", 0) if server is None else server.getsockname()[:2]
    return FactSheet(socket.gethostname(), os.getpid(), settings, endpoint)


def listen_as_gloo(interface: str, limit_s: float) -> socket.socket | None:
    """A socket that listens where torch's `ProcessGroupGloo` would, or `None` if it cannot.

    That is at `interface`, if given; else at the address of the host's own name, if it can be bound, or loopback.
    """
    addresses = [one.address for one in psutil.net_if_addrs().get(interface, ())]
    if not interface:
        with suppress(OSError):
            addresses += resolve(socket.gethostname(), limit_s)
        addresses.append("127.0.0.1")
    for address in addresses:
        with suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, 0), family=family)
    return None


def run_on_all(
    messages: Messages, topic: str, part: Callable[[], T], limit_s: float
) -> tuple[dict[int, T], dict[int, str]]:
    """Run `part` on every rank, within `limit_s`. Returns the values and the errors of all ranks, by rank."""
    value, error, deadline = None, "", time.monotonic() + limit_s
    try:
        value = call_with_limit(part, limit_s)
    except Exception as raised:
        error = f"{type(raised).__name__}: {first_line(raised)}"
    messages.post((value, error), topic)
    outcomes = messages.gather(topic, limit_s=deadline - time.monotonic() + MARGIN_S)
    everyone = {rank: outcomes.get(rank, (None, "no answer")) for rank in range(messages.world_size)}
    values = {rank: value for rank, (value, error) in everyone.items() if not error}
    return values, {rank: error for rank, (_, error) in everyone.items() if error}


class Measurement(NamedTuple):
    """The time that a rank needs for the same work as all others, and the cost of an all-reduce."""

    computing_s: float
    link: Link


def measure(messages: Messages, device: torch.device, limit_s: float) -> Measurement:
    """Make the default process group, check a sum, and measure."""
    if device.type == "cuda":
        streams.make_current(device)
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
    factor = torch.randn(WIDTH, WIDTH, device=device)
    torch.mm(factor, factor)
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(PRODUCTS):
        product = torch.mm(factor, factor)
    product[0, 0].item()  # waits for a GPU
    computing_s = time.perf_counter() - began_s
    transport = open_transport("auto", dist.distributed_c10d._get_default_group(), device)
    return Measurement(computing_s, measure_link(transport, device, clock_of([device])))
