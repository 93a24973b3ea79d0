"""A transport for ranks that are threads of one process: DDP in a debugger. Tensors are sent through queues.

    def train(transport):
        ddp = wrapped(copy.deepcopy(model), transport)
        ...  # breakpoints here, in the model and in minddp stop every rank

    on_threads(2, train)

The wrapper sends everything through it: the comparison of the replicas, rank 0's weights, buffers, gradients. There
is no process group, no guard and no watchdog. Tensors are added in rank order. With two ranks the result has the
bits of torch's class on gloo, which adds in another order from three ranks on. Threads share torch's random state:
use generators instead.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp.transport import Transport

LIMIT_S = 600.0  # for a slower rank, which may be at a breakpoint


class ThreadWork:
    """A collective in flight. `finish` waits for the tensors of all ranks, and computes the result."""

    def __init__(self, finish: Callable[[], object]):
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: object = None) -> None:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def is_completed(self) -> bool:
        return self._finish is None


class ThreadTransport(Transport):
    """All ranks send (collective, rank, tensor) to the inbox of each rank."""

    adds_after_s = 0.0
    waits_again = False
    store = None

    def __init__(self, rank: int, inboxes: Sequence[queue.SimpleQueue[Any]]):
        self.rank, self.world_size = rank, len(inboxes)
        self._inboxes = inboxes
        self._number = 0
        self._received: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)  # by collective and rank

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor) -> ThreadWork:
        receive = self._send([tensor] * self.world_size)
        return ThreadWork(lambda: tensor.copy_(reduce(torch.add, receive())))

    def broadcast(self, tensor: torch.Tensor, source: int) -> ThreadWork:
        receive = self._send([tensor] * self.world_size)
        return ThreadWork(lambda: tensor.copy_(receive()[source]))

    def all_to_all(self, received: Any, sent: Any, sizes_in: Sequence[int], sizes_out: Sequence[int]) -> ThreadWork:
        receive = self._send(sent.split(list(sizes_out)))
        return ThreadWork(lambda: received.copy_(torch.cat(receive())))

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._send([tensor] * self.world_size)()

    def when_group_ends(self, end: object) -> None:
        return None

    def _send(self, parts: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Send rank r `parts[r]`. Returns a function that waits for the parts of all ranks, in rank order."""
        self._number += 1
        for inbox, part in zip(self._inboxes, parts, strict=True):
            inbox.put((self._number, self.rank, part.detach().clone()))
        return partial(self._receive, self._number)

    def _receive(self, number: int) -> list[torch.Tensor]:
        while len(self._received[number]) < self.world_size:
            sent_in, source, part = self._inboxes[self.rank].get(timeout=LIMIT_S)
            if isinstance(part, BaseException):
                raise RuntimeError(f"Rank {source} has failed.") from part
            self._received[sent_in][source] = part
        return [part for _, part in sorted(self._received.pop(number).items())]


def wrapped(module: nn.Module, transport: Transport, **options: Any) -> minddp.DistributedDataParallel:
    """The group has no backend, only a rank and a size."""
    group = dist.ProcessGroup(transport.rank, transport.world_size)  # type: ignore[call-arg]
    return minddp.DistributedDataParallel(module, process_group=group, transport=transport, **options)


def on_threads(world_size: int, body: Callable[[Transport], Any]) -> list[Any]:
    """The results of `body(transport)` of all ranks, in rank order. A rank that fails ends the others."""
    inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(world_size)]

    num_threads = torch.get_num_threads()

    def run(rank: int) -> Any:
        torch.set_num_threads(num_threads)  # not inherited; the bits of products depend on it
        try:
            return body(ThreadTransport(rank, inboxes))
        except BaseException as error:
            for inbox in inboxes:
                inbox.put((0, rank, error))
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
