"""Processes that are the ranks of one group, and a time limit for whatever they are asked to do."""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

START_LIMIT_S = 120.0  # for importing torch, and meeting the others


class RankFailure(RuntimeError):
    """Only the ranks in `results` returned. For the others, `reports[rank]` is a traceback, `died` or `hung`."""

    def __init__(self, reports: dict[int, str], results: dict[int, Any]):
        self.reports, self.results = reports, results
        super().__init__("\n".join(f"rank {rank}: {report}" for rank, report in sorted(reports.items())))


class Ranks(AbstractContextManager["Ranks"]):
    """`with Ranks(2) as ranks: ranks.run(body, *args)` is `[body(0, *args), body(1, *args)]`.

    `body` is a function of a module. No process outlives the `with`, and none outlives a failure: the next `run`
    starts new ones.
    """

    def __init__(self, world_size: int, limit_s: float = 60.0, join: Callable[..., None] | None = None):
        self.world_size = world_size
        self.limit_s = limit_s
        self.join = join or join_gloo
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def __exit__(self, *_: object) -> None:
        self.kill()

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """What `body` returns on each rank.

        Raises:
            RankFailure: it raises on a rank, or a rank dies, or is not done after `limit_s`.
        """
        if not self.processes:
            self.start()
            self.answers(START_LIMIT_S)
        for pipe in self.pipes:
            pipe.send((body, args))
        return self.answers(self.limit_s)

    def answers(self, limit_s: float) -> list[Any]:
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < self.world_size and time.monotonic() < deadline:
            open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready: list[Any] = wait(open_pipes, timeout=0.1)
            for pipe in ready:
                answers[open_pipes[pipe]] = received(pipe)
            if any(kind != "result" for kind, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + 2)  # the others may wait for this rank for ever
        reports = {rank: "hung" for rank in range(self.world_size) if rank not in answers}
        reports |= {rank: what for rank, (kind, what) in answers.items() if kind != "result"}
        if reports:
            self.kill()
            raise RankFailure(reports, {rank: answers[rank][1] for rank in answers.keys() - reports.keys()})
        return [answers[rank][1] for rank in range(self.world_size)]

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")  # which imports torch once, for all ranks
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "numpy"])
        self.folder = tempfile.TemporaryDirectory(prefix="reference-")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, f"file://{self.folder.name}/store", self.join, theirs)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        if self.processes:
            self.folder.cleanup()
        self.processes, self.pipes = [], []


def received(pipe: Connection) -> tuple[str, Any]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return "died", "died"


def serve(rank: int, world_size: int, rendezvous: str, join: Callable[..., None], pipe: Connection) -> None:
    """Body of a process: join the group, then run what is asked for until the pipe closes."""
    torch.set_num_threads(1)
    join(rank, world_size, rendezvous)
    pipe.send(("result", "ready"))
    while True:
        try:
            body, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("result", body(rank, *args))
        except Exception:
            answer = ("raised", traceback.format_exc())
        pipe.send(answer)


def join_gloo(rank: int, world_size: int, rendezvous: str) -> None:
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timeout)
