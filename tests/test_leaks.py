"""Many wrappers, one after the other in one process, leave nothing behind in it.

Everything of a process that outlives a wrapper if it is left behind is counted before and after.
"""

from __future__ import annotations

import atexit
import copy
import gc
import os
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecision  # as torch's wrapper takes it
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import minddp
from minddp.platform import ranks
from minddp.tools.watchdog import check, comparison, inquiry
from tests.ranks import on_one_thread

COUNT = 25
SETTLED_S = 30.0  # for threads to make their last turn, and for the store's server to close connections


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def delayed(net: Net) -> dict[str, Any]:
    later = [(name, param) for name, param in net.named_parameters() if name.startswith("second")]
    return {"delay_all_reduce_named_params": later, "param_to_hook_all_reduce": net.first.weight}


OPTIONS: dict[str, Callable[[Net], dict[str, Any]]] = {
    "default": lambda net: {},
    "find_unused_parameters": lambda net: {"find_unused_parameters": True},
    "static_graph": lambda net: {"static_graph": True},
    "views": lambda net: {"gradient_as_bucket_view": True},
    "mixed_precision": lambda net: {
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    },
    "check_finite": lambda net: {"check_finite": True},
    "logical_ranks": lambda net: {"logical_ranks": 2},
    "delayed": delayed,
    "comm_hook": lambda net: {},
    "overlap_optimizer": lambda net: {},
    "frequent turns": lambda net: {},
    "a copy": lambda net: {},
    "an exception": lambda net: {},
    "an exception, not watched": lambda net: {"stuck_after_s": None},
}


def wrap_and_train(mode: str, transport: str) -> None:
    """One wrapper from its construction to two steps, after which nothing refers to it."""
    net = Net()
    ddp = minddp.DistributedDataParallel(net, transport=transport, **OPTIONS[mode](net))
    if mode == "comm_hook":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with ExitStack() as frequent:
        if mode == "frequent turns":
            for module, name, value in (
                (comparison, "EVERY_S", 0.001),
                (inquiry, "READ_EVERY_S", 0.001),
                (check, "EVERY", 1),
            ):
                frequent.enter_context(mock.patch.object(module, name, value))
        train(ddp, mode)
        if mode == "a copy":
            train(copy.deepcopy(ddp), mode)


def train(ddp: Any, mode: str) -> None:
    optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.01)
    if mode == "overlap_optimizer":
        ddp.overlap_optimizer(optimizer)
    for _ in range(2):
        inputs = torch.ones(2, 8, requires_grad=True)
        for _ in ddp.shares() if mode == "logical_ranks" else range(1):
            if mode.startswith("an exception"):
                inputs.register_hook(lambda grad: 1 / 0)
            try:
                ddp(inputs * 1).sum().backward()
            except ZeroDivisionError:
                return
        if mode != "overlap_optimizer":
            optimizer.step()
        optimizer.zero_grad()


def num_threads_of_python() -> int:
    """A thread of gloo in which a garbage collection has logged something is known to Python, but is not ours."""
    return sum(not isinstance(thread, threading._DummyThread) for thread in threading.enumerate())


def survey() -> dict[str, int]:
    """How many there are in this process and in the group's store."""
    hooks = [hooks for name, hooks in vars(torch_module).items() if name.startswith("_global") and "hooks" in name]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "hooks before optimizer steps": len(torch_optimizer._global_optimizer_pre_hooks),
        "hooks after optimizer steps": len(torch_optimizer._global_optimizer_post_hooks),
        "hooks of all modules": sum(len(each) for each in hooks if isinstance(each, dict)),
        "threads": num_threads_of_python(),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "shared segments": sum("memfd:" in line or "/dev/shm" in line for line in maps),
        "functions at exit": atexit._ncallbacks(),
        "finalizers": len(weakref.finalize._registry),  # type: ignore[attr-defined]
        "groups": len(dist.distributed_c10d._world.pg_map),
        "keys of the store": dist.distributed_c10d._get_default_store().num_keys(),
    }


def objects() -> Counter[str]:
    """How many of each type the garbage collector knows."""
    gc.collect()
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


def grown(before: dict[str, int], after: dict[str, int], at_least: int = 1) -> dict[str, int]:
    return {name: more for name in after if (more := after[name] - before.get(name, 0)) >= at_least}


def settled(num_threads: int) -> dict[str, int]:
    """The survey after the threads of wrappers that are gone have ended, on all ranks."""
    end = time.monotonic() + SETTLED_S
    gc.collect()
    while num_threads_of_python() > num_threads and time.monotonic() < end:
        time.sleep(0.02)
        gc.collect()  # a wrapper that a thread was using a moment ago may be part of a cycle
    dist.barrier()
    return survey()


def growth(rank: int, mode: str, transport: str, count: int) -> dict[str, int]:
    """By how much each number has grown after `count` wrappers; the first ones are not counted.

    Of objects that are not ours there may be some more, but not one for each wrapper.
    """
    num_threads = num_threads_of_python()
    for _ in range(2):
        wrap_and_train(mode, transport)
    objects()  # the first `Counter` of a generator leaves 36 weak references in caches of abstract classes
    before, objects_before = settled(num_threads), objects()
    for _ in range(count):
        wrap_and_train(mode, transport)
    more = grown(before, settled(num_threads))
    end = time.monotonic() + SETTLED_S
    while more and time.monotonic() < end:
        time.sleep(0.05)
        gc.collect()
        more = grown(before, survey())
    more_objects = grown(objects_before, objects())
    own = {name: number for name, number in more_objects.items() if name.startswith("minddp.")}
    other = grown({}, more_objects, at_least=count)
    dist.barrier()
    return {**more, **own, **other}


def join_group(rank: int, num_ranks: int, _rendezvous: str, *, port: int) -> None:
    """By a TCPStore, as under a launcher: each clone of a FileStore reads all that has ever been written."""
    os.environ["RES_OPTIONS"] = "attempts:0"  # else the store's server asks a name server who connects
    on_one_thread(rank)
    ranks.join_group(rank, num_ranks, f"tcp://127.0.0.1:{port}")


def growth_of_modes(transport: str) -> Iterator[tuple[str, list[dict[str, int]]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pool = ranks.RankPool(2, partial(join_group, port=port))
    try:
        for mode in OPTIONS:
            yield mode, pool.run(growth, mode, transport, COUNT)
    finally:
        pool.kill()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
def test_wrappers_that_are_gone_leave_nothing_behind(transport: str) -> None:
    for mode, of_rank in growth_of_modes(transport):
        assert of_rank == [{}, {}], f"{mode} over {transport}"
