"""Ranks of a benchmark: those of `minddp.launch`, with a GPU or a network of their own if wanted.

[Note: memory is kept]
Memory that a step frees at the end of the heap is given back to the system by glibc, and the next step gets it
again page by page: up to 16,000 page faults, 15 ms, in a step with 64 MiB of gradients. That depends on the
memory behind it on the heap: in a process with all contestants, on the gradients that exist during another's turn.
So ranks keep the memory that they free, in every turn.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from minddp.platform.ranks import join_group, launch

DeviceName = Literal["cpu", "cuda"]

#: Parameters of glibc's `mallopt`, and the values with which it keeps freed memory. See [Note: memory is kept].
KEEP_MEMORY = {"M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_MMAP_MAX": (-4, 0)}


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

    Each rank computes with `threads` threads, or with the GPU of its number. `settle(rank)` comes first in its
    process and returns the group's init_method; by default that is a file. Raises as `minddp.launch`.

    Under torchrun, which ends its ranks itself, this process is one of them: returns `[fn(its rank, *args)]`.
    """
    if under_torchrun():
        rank = int(os.environ["RANK"])
        _enter(threads, device, settle, rank, world_size, "env://")
        result = fn(rank, *args)
        dist.destroy_process_group()
        return [result]
    return launch(fn, *args, ranks=world_size, timeout_s=timeout_s, enter=partial(_enter, threads, device, settle))


def under_torchrun() -> bool:
    """True in a process that torchrun has started, which is a rank and starts none."""
    return dist.is_torchelastic_launched()


def _enter(
    threads: int,
    device: DeviceName,
    settle: Callable[[int], str] | None,
    rank: int,
    num_ranks: int,
    rendezvous: str,
) -> None:
    os.environ["KINETO_LOG_LEVEL"] = "6"  # or the profiler announces itself on every rank
    if platform.libc_ver()[0] == "glibc":
        for parameter, value in KEEP_MEMORY.values():
            ctypes.CDLL(None).mallopt(parameter, value)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if under_torchrun() else rank)
    meeting_place = settle(rank) if settle else rendezvous
    join_group(rank, num_ranks, meeting_place, backend="nccl" if device == "cuda" else "gloo", threads=threads)
