"""Measurements between ranks, some seconds in all. Every rank calls these functions in the same order."""

from __future__ import annotations

import datetime
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from minddp.doctor.fact_sheet import listen
from minddp.doctor.store_connection import CONNECT_LIMIT_S, obstacle_of
from minddp.doctor.store_exchange import StoreExchange
from minddp.transport import Transport
from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.shared_memory import CannotConnect, connect_ranks

SIZES = (4 * 2**10, 2**20, 16 * 2**20)  # bytes; DDP's buckets hold 25 MiB
REPEATS = 10
SLOW_S = 0.5  # no larger message is tried after one that takes longer
PRODUCTS = 80
WIDTH = 512


def probe_connections(exchange: StoreExchange, address: str, limit_s: float) -> dict[str, str]:
    """Listen at `address`, where gloo would, and connect to every other rank.

    gloo connects each pair of ranks in one direction only, and its errors name an address but no reason. This tries
    both directions of all pairs at once. Returns the obstacle by rank (as text), empty where there is none.
    """
    others = [rank for rank in range(exchange.world_size) if rank != exchange.rank]
    with listen(address, backlog=exchange.world_size) as server, ThreadPoolExecutor() as threads:
        exchange.post("listening", server.getsockname()[:2])
        endpoints = exchange.gather("listening", limit_s)
        obstacles = list(threads.map(lambda rank: _obstacle_to(endpoints.get(rank)), others))
        exchange.post("probed", True)
        exchange.gather("probed", limit_s)  # listen until every rank has tried
    return {str(rank): obstacle for rank, obstacle in zip(others, obstacles, strict=True)}


def _obstacle_to(endpoint: list[Any] | None) -> str:
    if endpoint is None:
        return "not listening"
    try:
        socket.create_connection((endpoint[0], endpoint[1]), CONNECT_LIMIT_S).close()
    except OSError as error:
        return obstacle_of(error)
    return ""


def connect(store: dist.Store, rank: int, world_size: int, device: torch.device, limit_s: float) -> None:
    """Make the default process group and add up a one from each rank."""
    limit = datetime.timedelta(seconds=limit_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if total.item() != world_size:
        raise RuntimeError(f"ones on {world_size} ranks added up to {total.item():g}")


@dataclass(frozen=True)
class Measurement:
    """What one rank has measured.

    `waited` is the share of the time in which the rank computed but had no core. `curves` hold the median time of
    an all-reduce by each transport, as pairs of bytes and seconds.
    """

    waited: float
    curves: dict[str, list[list[float]]]


def measure(device: torch.device) -> Measurement:
    """All measurements, on every rank at the same time."""
    waited = _share_without_core(device)
    over_group = ProcessGroupTransport(dist.distributed_c10d._get_default_group())
    curves = {str(dist.get_backend()): _time_all_reduce(over_group, device)}
    with suppress(CannotConnect):  # ranks on several hosts or on GPUs
        curves["shared memory"] = _time_all_reduce(connect_ranks(over_group, device), device)
    return Measurement(waited, curves)


def _share_without_core(device: torch.device) -> float:
    """The share of the time without a core while this thread multiplies matrices on the CPU.

    Arithmetic rather than a collective, in which the rank's own threads compete for its cores.
    """
    left = torch.randn(WIDTH, WIDTH)
    torch.mm(left, left)
    _largest(0.0, device)
    began_s, had_core_s = time.perf_counter(), time.thread_time()
    for _ in range(PRODUCTS):
        torch.mm(left, left)
    return max(0.0, 1 - (time.thread_time() - had_core_s) / (time.perf_counter() - began_s))


def _time_all_reduce(transport: Transport, device: torch.device) -> list[list[float]]:
    """Pairs of bytes and seconds, one for each size, up to the first that is slow."""
    curve: list[list[float]] = []
    for nbytes in SIZES:
        tensor = transport.allocate(nbytes // 4, torch.float32, device).zero_()
        _seconds(transport, tensor)  # the first call may connect, allocate or load
        if (trial_s := _largest(_seconds(transport, tensor), device)) > SLOW_S:
            return [*curve, [nbytes, trial_s]]
        curve.append([nbytes, statistics.median(_seconds(transport, tensor) for _ in range(REPEATS))])
    return curve


def _seconds(transport: Transport, tensor: torch.Tensor) -> float:
    """The time of an all-reduce, begun on all ranks at once."""
    _largest(0.0, tensor.device)
    began = time.perf_counter()
    transport.all_reduce(tensor).wait()
    if tensor.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _largest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values. No rank returns before every rank has called."""
    largest = torch.tensor([value], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()
