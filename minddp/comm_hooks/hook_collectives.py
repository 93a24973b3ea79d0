"""The collectives of a hook: scatter the shards to the ranks that sum them, then gather the sums.

A hook that rounds has two phases, and computes between them. If a callback of the first phase started the second
one, buckets would send in a random order, different on each rank. So one thread runs all jobs of a hook, bucket by
bucket in launch order, which is the same on every rank. It uses a process group of its own, because the order in
which this thread and others send is random, too. Backward continues meanwhile.

On a device with streams the caller's thread runs the jobs. It only puts messages and sums on the stream, in launch
order, and does not wait for them.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minddp.platform import streams
from minddp.platform.store import next_serial

Job = Callable[[], object]


class HookCollectives:
    """Collectives over the ranks of `group` (by default all), for the hook of `module`. Making it is collective.

    `enqueue(job)` calls `job`, which must not raise, after the jobs of earlier calls.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        ranks = dist.get_process_group_ranks(group)  # as numbered in the default group
        self.size, self.rank = len(ranks), dist.get_rank(group)
        self._group = _new_group_like(group, ranks, next(module.parameters()).device)
        self.enqueue: Callable[[Job], object] = lambda job: job()
        if not any(streams.has_streams(param.device) for param in module.parameters()):
            jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(jobs,), name="minddp hook", daemon=True).start()
            weakref.finalize(self, jobs.put, None)
            self.enqueue = jobs.put

    def run(self, buffer: torch.Tensor, job: Job) -> torch.futures.Future[torch.Tensor]:
        """Enqueue `job`, which reduces `buffer` in place. Returns the hook's result, the future of `buffer`."""
        devices: list[Any] | None = [buffer.device] if buffer.device.index is not None else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

        def fulfil() -> None:
            try:
                with torch.no_grad():
                    job()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(buffer)

        self.enqueue(fulfil)
        return future

    def drain(self) -> None:
        """Wait for the jobs of earlier calls."""
        self.run(torch.empty(0), lambda: None).wait()

    def all_to_all(self, shards: torch.Tensor) -> torch.Tensor:
        """`[size, ...]` in, `[size, ...]` out: shard `rank` of every rank, in the order of the ranks. Any dtype."""
        sent = shards.contiguous().view(self.size, -1).view(torch.uint8)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received.view(shards.dtype).view(shards.shape)

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """`[...]` in, `[size, ...]` out: the shards of all ranks. Any dtype."""
        sent = shard.contiguous().view(-1).view(torch.uint8)
        gathered = sent.new_empty(self.size, sent.numel())
        dist.all_gather(list(gathered), sent, group=self._group)
        return gathered.view(shard.dtype).view(self.size, *shard.shape)


def check_bucket(bucket: dist.GradBucket, hook: str, dtypes: Collection[torch.dtype]) -> None:
    """Raise `TypeError` if the gradients are sparse, complex, or not of one of `dtypes`."""
    buffer, params = bucket.buffer(), bucket.parameters()
    has = next((str(param.dtype) for param in params if param.is_complex()), str(buffer.dtype))
    if buffer.layout != torch.strided:
        has = "sparse"
    if has not in map(str, dtypes):
        shapes = ", ".join(str(list(param.shape)) for param in params[:5])
        raise TypeError(
            f"`{hook}` takes dense gradients of {', '.join(map(str, dtypes))}, but those of bucket "
            f"{bucket.index()} are {has}, of parameters of shape {shapes}. Convert them, or use no hook."
        )


def _new_group_like(group: dist.ProcessGroup | None, ranks: list[int], device: torch.device) -> Any:
    """A second group of `ranks`, with the timeout of `group`. Only these ranks take part.

    Torch 2.13 names such a group after the number of groups that the rank is in, and torch 2.15 counts it on its
    members only, and names later groups by the count. Where ranks disagree about a number, making a group hangs. So
    the name comes from here, and the count is restored.
    """
    timeout = None
    with suppress(RuntimeError, AttributeError):  # a backend without options
        backend = (group or dist.distributed_c10d._get_default_group())._get_backend(device)
        timeout = backend.options._timeout
    if group is None:
        return dist.new_group(ranks, timeout)
    c10d: Any = dist.distributed_c10d
    topic = f"minddp/groups of hooks on {ranks}"
    name = f"{topic}/{next_serial(c10d._get_default_store(), topic, dist.get_rank())}"
    count, name_of = c10d._world.group_count, c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda _: name
    try:
        return dist.new_group(ranks, timeout, use_local_synchronization=True)
    finally:
        c10d._world.group_count, c10d._hash_ranks_to_str = count, name_of


def _work(jobs: "queue.SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds a bucket
