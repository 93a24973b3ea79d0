"""The messages of a hook: ranks scatter shards, each sums the one that it owns, and the sums are gathered.

[Note: two phases, one thread]
A plain all-reduce is one message that a process group carries while backward goes on. A hook that rounds has two,
and computes between them. If a callback of the first sent the second, buckets would send in an order that is
chance, and another one on each rank. So all that a hook does runs in one thread, bucket by bucket in launch order,
the same on every rank; and on a process group of its own, because the order in which this thread and others send is
chance, too. Backward goes on meanwhile.

Where the device has streams the caller's thread does it: it only puts messages and sums on the stream, in that
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


class Exchange:
    """The ranks of `group` (the default group if None) as the hook of `module` uses them. Making it is collective.

    `size` is the number of ranks, `rank` this one's number among them. `enqueue(job)` calls `job`, which must not
    raise, after those of earlier calls. See [Note: two phases, one thread].
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        self._ranks = dist.get_process_group_ranks(group)  # their numbers in the default group
        device = next(module.parameters()).device
        backend = (group or dist.distributed_c10d._get_default_group())._get_backend(device)
        limit = None
        with suppress(RuntimeError, AttributeError):  # a backend without options
            limit = backend.options._timeout
        self._group = _new_group_beside(group, self._ranks, limit)
        self.size, self.rank = len(self._ranks), dist.get_rank(group)
        self.enqueue: Callable[[Job], object] = lambda job: job()
        if not any(streams.has_streams(param.device) for param in module.parameters()):
            jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(jobs,), name="minddp hook", daemon=True).start()
            weakref.finalize(self, jobs.put, None)
            self.enqueue = jobs.put

    def run(self, buffer: torch.Tensor, job: Job) -> torch.futures.Future[torch.Tensor]:
        """Enqueue `job`, which turns `buffer` into what the hook gives back."""
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

    def all_to_all(self, shards: torch.Tensor) -> torch.Tensor:
        """Shard `rank` of every rank: `[size, ...]` in, `[size, ...]` out, in the order of the ranks. Any dtype.

        By messages from rank to rank, which each backend has in each version; gloo has no all-to-all in some.
        """
        sent = shards.contiguous().view(self.size, -1).view(torch.uint8)
        received = torch.empty_like(sent)
        received[self.rank] = sent[self.rank]
        messages = []
        for place, peer in enumerate(self._ranks):
            if place != self.rank:
                messages.append(dist.P2POp(dist.isend, sent[place], peer, self._group))
                messages.append(dist.P2POp(dist.irecv, received[place], peer, self._group))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return received.view(shards.dtype).view(shards.shape)

    def all_gather(self, shard: torch.Tensor) -> torch.Tensor:
        """The shards of all ranks: `[...]` in, `[size, ...]` out. Any dtype."""
        sent = shard.contiguous().view(-1).view(torch.uint8)
        gathered = sent.new_empty(self.size, sent.numel())
        dist.all_gather(list(gathered), sent, group=self._group)
        return gathered.view(shard.dtype).view(self.size, *shard.shape)


def check_bucket(bucket: dist.GradBucket, hook: str, dtypes: Collection[torch.dtype]) -> None:
    """Raise `TypeError`, with the parameters' shapes, for gradients that are sparse or not of one of `dtypes`."""
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


def _new_group_beside(group: dist.ProcessGroup | None, ranks: list[int], limit: Any) -> Any:
    """A further group of `ranks`, those of `group`. Other ranks take no part.

    torch 2.15 counts such a group on its ranks, and names later groups by the count: unless it is put back, the
    next group of all ranks hangs. For the name of this one the count is a number that no other group has.
    """
    if group is None:
        return dist.new_group(ranks, limit)
    world, store = dist.distributed_c10d._world, dist.distributed_c10d._get_default_store()
    count = world.group_count
    world.group_count = -next_serial(store, f"minddp/groups of hooks on {ranks}", dist.get_rank())
    try:
        return dist.new_group(ranks, limit, use_local_synchronization=True)
    finally:
        world.group_count = count


def _work(jobs: "queue.SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds a bucket
