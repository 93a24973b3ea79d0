"""Real ranks for tests: worker processes in one gloo group, reused from test to test.

`RankPool(3).run(fn, *args)` calls the module-level function `fn(rank, *args)` in three processes that share
a gloo process group, and returns the three results in rank order. Every wait has a time limit: when a rank
dies, hangs or raises, all ranks of the pool are killed, `RankFailure` says what each of them did, and the
next `run` starts new ones. Processes are forked from a server that has imported what every rank needs, so a new
pool costs about a tenth of a second. `torch._dynamo` is part of that: torch imports it, a second's work, in each
process that wraps a module or makes an optimizer.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy", "pytest"])


class RankFailure(AssertionError):
    """Some rank did not return a result; `reports[rank]` is its traceback, or how it ended.

    `results` are those of the other ranks.
    """

    def __init__(self, reports: dict[int, str], results: dict[int, Any]):
        self.reports = reports
        self.results = results
        super().__init__("\n".join(f"--- rank {rank}: {report}" for rank, report in sorted(reports.items())))


@dataclass(frozen=True)
class Group:
    """The process group that the ranks of a pool join; `rendezvous` is a file that does not exist yet."""

    backend: str
    world_size: int
    timeout_s: float
    rendezvous: str

    def join(self, rank: int) -> None:
        import torch.distributed as dist

        dist.init_process_group(
            self.backend,
            init_method=f"file://{self.rendezvous}",
            rank=rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=self.timeout_s),
        )


def _serve(rank: int, prepare: Callable[[int], None], group: Group, pipe: Connection) -> None:
    """Body of a worker process: join the group, then run what arrives until the pipe closes."""
    prepare(rank)
    group.join(rank)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(("ok", fn(rank, *args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


def on_one_thread(rank: int) -> None:
    """And without all of torch's objects in each garbage collection, which is an eighth of a script's time."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()


class RankPool:
    """`world_size` processes in one group, started at the first `run` and again after a failure.

    `prepare` is what each calls with its rank before it joins the group, whose backend is `backend`.
    """

    backend = "gloo"
    prepare: Callable[[int], None] = staticmethod(on_one_thread)

    def __init__(self, world_size: int, group_timeout_s: float = 30.0, grace_s: float = 5.0):
        self.world_size = world_size
        self.grace_s = grace_s
        self.group_timeout_s = group_timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the file in which the ranks meet
        atexit.register(self.kill)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """`[fn(0, *args), fn(1, *args), ...]`, each computed on its own rank."""
        return self.run_each(fn, [args] * self.world_size, timeout_s=timeout_s)

    def run_each(
        self, fn: Callable[..., Any], args_of_rank: list[tuple[Any, ...]], timeout_s: float = 60.0
    ) -> list[Any]:
        """Like `run`, with arguments of its own for each rank."""
        if not self._processes:
            self._start()
        for pipe, args in zip(self._pipes, args_of_rank, strict=True):
            pipe.send((fn, args))
        return self._collect(time.monotonic() + timeout_s)

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="minddp-test-")
        rendezvous = os.path.join(self._folder.name, "store")
        group = Group(self.backend, self.world_size, self.group_timeout_s, rendezvous)
        for rank in range(self.world_size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, self.prepare, group, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = set(range(self.world_size))
        while waiting:
            ready = mp.connection.wait([self._pipes[rank] for rank in waiting], timeout=0.5)
            for rank in list(waiting):
                if self._pipes[rank] not in ready:
                    continue
                waiting.discard(rank)
                try:
                    status, value = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    failures[rank] = f"died with exit code {self._processes[rank].exitcode}"
                    continue
                if status == "ok":
                    results[rank] = value
                else:
                    failures[rank] = value
            if failures:
                # The others may be stuck in a collective that cannot complete: kill them after a grace period.
                deadline = min(deadline, time.monotonic() + self.grace_s)
            if waiting and time.monotonic() > deadline:
                for rank in waiting:
                    failures[rank] = "gave no answer in time and was killed"
                break
        if failures:
            self.kill()
            raise RankFailure(failures, results)
        return [results[rank] for rank in range(self.world_size)]
