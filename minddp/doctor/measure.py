"""The measurements: the group at work, for a second or two. Every rank calls these functions in the same order.

What they return goes to the other ranks as JSON: times in seconds. Loops run equally often on all ranks: what
decides about it has been agreed on.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp.doctor.fit import CoreTime, share_denied
from minddp.doctor.place import Place
from minddp.platform.cores import read_if_there
from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.protocols import Transport
from minddp.transport.shared_memory import CannotConnect, connect_ranks

SIZES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)  # bytes; DDP's buckets hold 25 MiB
_BUDGET_S = 0.2  # for one size
_FEW, _MANY = 3, 30
_SLOW_S = 1.0  # a message that takes longer is the largest
_BARRIERS = 16
_PAIRS = 9
_WIDTH = 512
_BATCH = 256


@dataclass(frozen=True)
class Connection:
    """A rank's seat in the group. `control` is gloo, also beside NCCL."""

    place: Place
    device: torch.device
    over_group: ProcessGroupTransport
    control: ProcessGroupTransport

    def barrier(self) -> None:
        self.control.all_reduce(torch.zeros(1)).wait()

    def agree(self, value: float) -> float:
        """The largest of all ranks' values."""
        return max(float(one) for one in self.control.all_gather(torch.tensor([value], dtype=torch.float64)))


def connect(place: Place, store: dist.Store, device: torch.device, timeout_s: float) -> Connection:
    """Make the process group, and see it add up."""
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with on(device):
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
        group = dist.distributed_c10d._get_default_group()
        control = dist.new_group(backend="gloo", timeout=timeout) if backend == "nccl" else group
        total = torch.ones(1, device=device)
        ProcessGroupTransport(group).all_reduce(total).wait()
        if total.item() != place.world_size:
            raise RuntimeError(f"ones on {place.world_size} ranks added up to {total.item():g}")
    return Connection(place, device, ProcessGroupTransport(group), ProcessGroupTransport(control))


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one, which in torch is a matter of each thread's own."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield


# ---------------------------------------------------------------------- clocks


def read_clocks(connection: Connection) -> list[list[float]]:
    """The wall clock before and after each of some barriers."""
    readings = []
    for _ in range(_BARRIERS):
        before_s = time.time()
        connection.barrier()
        readings.append([before_s, time.time()])
    return readings


# ---------------------------------------------------------------------- collectives


def time_collectives(connection: Connection) -> dict[str, Any]:
    """`curves`: for each collective its median time, as pairs of bytes and seconds.

    `obstacle`: why ranks do not share memory, empty if they do.
    """
    over_group, device = connection.over_group, connection.device
    backend = dist.get_backend(over_group.group)
    curves = {
        f"all-reduce, {backend}": _curve(connection, over_group, lambda tensor: over_group.all_reduce(tensor)),
        f"broadcast, {backend}": _curve(connection, over_group, lambda tensor: over_group.broadcast(tensor, 0)),
    }
    obstacle = ""
    try:
        shared = connect_ranks(over_group, device)
        curves["all-reduce, shared memory"] = _curve(connection, shared, lambda tensor: shared.all_reduce(tensor))
    except CannotConnect as reason:
        obstacle = str(reason)
    return {"curves": curves, "obstacle": obstacle}


def _curve(
    connection: Connection, transport: Transport, collective: Callable[[torch.Tensor], Any]
) -> list[list[float]]:
    """Pairs of bytes and seconds, one for each size, up to the first that is slow."""
    curve: list[list[float]] = []
    for nbytes in SIZES:
        tensor = transport.allocate(nbytes // 4, torch.float32, connection.device).zero_()

        def call(tensor: torch.Tensor = tensor) -> None:
            collective(tensor).wait()

        call()  # the first time may connect, allocate or load
        trial_s = connection.agree(_seconds(connection, call))
        repeats = min(_MANY, max(_FEW, round(_BUDGET_S / trial_s))) if trial_s < _SLOW_S else 0
        times = [_seconds(connection, call) for _ in range(repeats)]
        curve.append([nbytes, statistics.median(times) if times else trial_s])
        if trial_s >= _SLOW_S:
            break
    return curve


def _seconds(connection: Connection, call: Callable[[], Any]) -> float:
    """How long `call` takes, begun on all ranks at once."""
    connection.barrier()
    began = time.perf_counter()
    call()
    if connection.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


# ---------------------------------------------------------------------- a step, and work without any exchange


def time_step(connection: Connection) -> dict[str, float]:
    """A small model's step under minddp: with its gradients averaged, and `alone`, under `no_sync`; in turns."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
    ddp = minddp.DistributedDataParallel(
        nn.Sequential(*layers).to(connection.device),
        device_ids=[connection.device.index] if connection.device.type == "cuda" else None,
    )
    batch = torch.randn(_BATCH, _WIDTH, device=connection.device)

    def step() -> None:
        ddp(batch).sum().backward()

    def step_alone() -> None:
        with ddp.no_sync():
            step()

    def turn(call: Callable[[], None]) -> float:
        ddp.zero_grad()
        return _seconds(connection, call)

    pairs = [(turn(step), turn(step_alone)) for _ in range(2 + _PAIRS)][2:]  # without the first, which warm up
    together, alone = zip(*pairs, strict=True)
    return {
        "together": statistics.median(together),
        "alone": statistics.median(alone),
        "parameters": float(sum(parameter.numel() for parameter in ddp.parameters())),
    }


def time_work(connection: Connection) -> dict[str, float | None]:
    """A fixed amount of arithmetic, the same on every rank and at the same time: the median of its `seconds`.

    `denied` is the share of the time in which this thread wanted a core and had none; `None` if the system does not
    tell. Only here can that be measured: while ranks exchange something their own threads take turns.
    """
    width = 4096 if connection.device.type == "cuda" else _WIDTH
    left = torch.randn(width, width, device=connection.device)

    def multiply() -> None:
        for _ in range(8):
            torch.mm(left, left)

    before = _core_time()
    seconds = statistics.median([_seconds(connection, multiply) for _ in range(1 + _PAIRS)][1:])
    after = _core_time()
    return {"seconds": seconds, "denied": share_denied(before, after) if before and after else None}


def _core_time() -> CoreTime | None:
    """Of this thread, as Linux counts it: the first two of three numbers, in nanoseconds."""
    told = read_if_there(Path("/proc/thread-self/schedstat")).split()
    return CoreTime(int(told[0]) / 1e9, int(told[1]) / 1e9) if len(told) == 3 else None
