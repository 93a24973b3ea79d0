"""Start the ranks of a benchmark and bring back what they return, within a time limit.

[Note: memory is kept]
Memory that a step frees at the end of the heap is given back to the system by glibc, and the next step gets it
again page by page: up to 16,000 page faults, 15 ms, in a step with 64 MiB of gradients. That depends on what lies
behind it on the heap: in a process that holds all contestants, on which gradients exist during another's turn. So
ranks keep the memory that they free, in every turn.
"""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, start_processes

DeviceName = Literal["cpu", "cuda"]

#: Variables in the ranks' environment, besides those of this process.
ENVIRONMENT = {
    "KINETO_LOG_LEVEL": "6",  # or the profiler announces itself on every rank
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),  # see [Note: memory is kept]
    "MALLOC_MMAP_MAX_": "0",
}


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int,
    threads: int,
    timeout_s: float,
    device: DeviceName = "cpu",
    settle: Callable[[int], str] | None = None,
) -> list[Any]:
    """`[fn(rank, *args) for rank in range(world_size)]`, each in a process of its own, in one process group.

    `fn` is a module-level function; each rank computes with `threads` threads, or with the GPU of its number.
    `settle(rank)` comes first in its process and returns the group's init_method; by default that is a file.
    Raises `TimeoutError` when the ranks are not done within `timeout_s`, and torch's `ProcessRaisedException` with
    the traceback when one raises. In either case no process is left behind.
    """
    with (
        tempfile.TemporaryDirectory(prefix="minddp-benchmark-") as directory,
        mock.patch.dict(os.environ, ENVIRONMENT),
    ):
        context = start_processes(
            _rank_main, (fn, args, world_size, threads, directory, device, settle), nprocs=world_size, join=False
        )
        assert context is not None, "start_processes returns a context if it does not join"
        _join(context, timeout_s)
        return [pickle.loads(_result_file(directory, rank).read_bytes()) for rank in range(world_size)]


def _rank_main(
    rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    threads: int,
    directory: str,
    device: DeviceName,
    settle: Callable[[int], str] | None,
) -> None:
    meeting_place = settle(rank) if settle else f"file://{directory}/store"
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=meeting_place,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=120),
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )
    _result_file(directory, rank).write_bytes(pickle.dumps(fn(rank, *args)))
    dist.barrier()  # a rank that leaves early takes its connections with it
    dist.destroy_process_group()
    sys.stdout.flush()
    # A thread of gloo's that still frees a Python callback would abort the process if the interpreter ended here.
    os._exit(0)


def _result_file(directory: str, rank: int) -> Path:
    return Path(directory) / f"result{rank}.pickle"


def _join(context: ProcessContext, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=5):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"The ranks were not done after {timeout_s:g} s and were ended; "
                    "run fewer rounds or raise --timeout-s."
                )
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
