"""Measurements between ranks, some seconds in all. Every rank calls these functions in the same order."""

from __future__ import annotations

import datetime
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from minddp.platform.store import Messages
from minddp.tools.doctor.fact_sheet import listen
from minddp.tools.forecast.gradient_clock import clock_of
from minddp.tools.forecast.link import measure_link
from minddp.tools.job.store_connection import CONNECT_LIMIT_S, obstacle_of
from minddp.transport import Transport
from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.shared_memory import CannotConnect, connect_ranks

PRODUCTS = 80
WIDTH = 512


def probe_connections(messages: Messages, address: str, limit_s: float) -> dict[int, str]:
    """Listen at `address`, as gloo would, and connect to every other rank. Returns the obstacles by rank.

    gloo connects each pair of ranks in one direction only, and its errors give an address but no reason. This tries
    both directions of all pairs at once.
    """
    others = [rank for rank in range(messages.world_size) if rank != messages.rank]
    with listen(address, backlog=messages.world_size) as server, ThreadPoolExecutor() as threads:
        messages.post(server.getsockname()[:2], "listening")
        endpoints = messages.gather("listening", limit_s=limit_s)
        obstacles = list(threads.map(lambda rank: _obstacle_to(endpoints.get(rank)), others))
        messages.post(True, "probed")
        messages.gather("probed", limit_s=limit_s)  # listen until every rank has tried
    return {rank: obstacle for rank, obstacle in zip(others, obstacles, strict=True) if obstacle}


def _obstacle_to(endpoint: Any) -> str:
    if endpoint is None:
        return "not listening"
    try:
        socket.create_connection(endpoint, CONNECT_LIMIT_S).close()
    except OSError as error:
        return obstacle_of(error)
    return ""


@dataclass(frozen=True)
class Measurement:
    """The measurements of one rank.

    `waited`: while the rank computed, it had no core for this share of the time. `links`, by transport: the latency
    of an all-reduce in seconds and its bytes per second, on the slowest rank.
    """

    waited: float
    links: dict[str, tuple[float, float]]


def measure(messages: Messages, device: torch.device, limit_s: float) -> Measurement:
    """Make the default process group, check a sum, and measure."""
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
    waited = _share_without_core()
    over_group = ProcessGroupTransport(dist.distributed_c10d._get_default_group())
    transports: dict[str, Transport] = {str(dist.get_backend()): over_group}
    with suppress(CannotConnect):  # ranks on several hosts or on GPUs
        transports["shared memory"] = connect_ranks(over_group, device)
    links = {name: measure_link(transport, device, clock_of([device])) for name, transport in transports.items()}
    return Measurement(waited, {name: (link.latency_s, link.bytes_per_s) for name, link in links.items()})


def _share_without_core() -> float:
    """Multiplies matrices on the CPU. In a collective the rank's own threads would compete for its cores."""
    left = torch.randn(WIDTH, WIDTH)
    torch.mm(left, left)
    dist.barrier()
    began_s, had_core_s = time.perf_counter(), time.thread_time()
    for _ in range(PRODUCTS):
        torch.mm(left, left)
    return max(0.0, 1 - (time.thread_time() - had_core_s) / (time.perf_counter() - began_s))
