"""Runs functions on ranks: processes of this host in one process group, with a time limit for each call.

The `multiprocessing` fork server, which has imported torch, forks them, so all but the first start within 0.1
s. Functions and results are sent by cloudpickle, which also supports functions defined in a notebook.
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

#: Called first on each rank, with rank, number of ranks and an `init_method` for the process group.
Enter = Callable[[int, int, str], None]
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "numpy", "cloudpickle"]


def launch(
    function: Callable[..., Any], *args: Any, ranks: int = 2, timeout_s: float = 300.0, enter: Enter | None = None
) -> list[Any]:
    """`[function(0, *args), function(1, *args), ...]`, each in a process of its own, in one process group (gloo).

    For notebooks, tests and benchmarks; for training there is `minddp run`. A script calls it below `if __name__ ==
    "__main__":`, since `multiprocessing` imports the script in each process. The call takes at most `timeout_s`
    seconds, and no rank outlives it. Arguments and results are copied: tensors keep shape, dtype and device.
    `enter` replaces `join_group`, for example by another backend.

    Raises:
        RankFailure: the function raised on a rank, a rank died, or a rank was not done in time.
    """
    pool = RankPool(ranks, enter or join_group)
    try:
        return pool.run(function, *args, timeout_s=timeout_s)
    finally:
        pool.kill()


def join_group(
    rank: int, num_ranks: int, rendezvous: str, *, backend: str = "gloo", threads: int = 1, timeout_s: float = 120.0
) -> None:
    """Initialise the process group, with `timeout_s` for each collective, and torch's number of threads."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=num_ranks, timeout=timeout)


class RankFailure(RuntimeError):
    """Some ranks did not return a result. `reports[rank]` is the rank's traceback, or describes how it exited."""

    def __init__(self, reports: dict[int, str], results: dict[int, Any]):
        self.reports = reports
        self.results = results  # of the other ranks
        super().__init__("\n".join(f"--- rank {rank}: {report}" for rank, report in sorted(reports.items())))


class RankPool:
    """Ranks that calls of `run` reuse. The first call starts them, and a call after a failure restarts them.

    When a rank has failed, the others may wait for it forever: they are killed `grace_s` seconds later.
    """

    def __init__(self, world_size: int, enter: Enter, grace_s: float = 5.0):
        self.world_size = world_size
        self.enter = enter
        self.grace_s = grace_s
        self._ranks: list[tuple[Any, Connection]] = []  # process and pipe
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the file through which they connect

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 180.0) -> list[Any]:
        """See `launch`."""
        deadline = time.monotonic() + timeout_s
        work = cloudpickle.dumps((function, args))
        try:
            if not self._ranks:
                self._start()
            for _, pipe in self._ranks:
                pipe.send_bytes(work)
            return self._collect(deadline)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join(10)
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._ranks, self._folder = [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="minddp-ranks-")
        enter = cloudpickle.dumps((self.enter, dict(os.environ)))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (theirs, enter, rank, self.world_size, f"file://{self._folder.name}/store")
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, deadline: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            ready: list[Any] = wait(list(waiting), timeout=left_s)
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = cloudpickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process, _ = self._ranks[rank]
                    process.join(5)
                    guard = '; is the call below `if __name__ == "__main__":`?' if process.exitcode == 1 else ""
                    answers[rank] = (False, f"died with exit code {process.exitcode}{guard}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + self.grace_s)
        answers |= dict.fromkeys(waiting.values(), (False, "gave no answer in time and was killed"))
        reports = {rank: value for rank, (ok, value) in answers.items() if not ok}
        results = {rank: value for rank, (ok, value) in answers.items() if ok}
        if reports:
            raise RankFailure(reports, results)
        return [results[rank] for rank in range(self.world_size)]


def _serve(pipe: Connection, enter: bytes, rank: int, *group: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    enter_group, environment = cloudpickle.loads(enter)
    os.environ.clear()  # of the server when it was started
    os.environ.update(environment)
    for number in itertools.count():
        work = pipe.recv_bytes()
        try:
            if number == 0:
                enter_group(rank, *group)
            function, args = cloudpickle.loads(work)
            answer = cloudpickle.dumps((True, function(rank, *args)))
        except BaseException:
            answer = cloudpickle.dumps((False, traceback.format_exc()))
        sys.stdout.flush()
        pipe.send_bytes(answer)


def _end_with_parent() -> None:
    """End this process when its parent ends, even in the middle of a collective."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(0)
