"""Transport over `torch.distributed`: whatever backend the process group has (gloo, NCCL, ...)."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from minddp.transport.protocols import Work
from minddp.transport.spin_wait import Wakefulness, wakefulness

_Group = dist.ProcessGroup
LARGEST_AWAKE_BYTES = 4 * 2**20  # with more to send, gloo's threads need all the time that they can get


class ProcessGroupTransport:
    """Calls the process group's own methods.

    `torch.distributed.all_reduce` and its siblings do the same after some twenty microseconds of checks and
    logging in Python, which a model with many buckets would pay many times in every step. The methods are taken
    from the base class: from there a group that is written in Python gets the options that it expects, too.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._is_foreign = type(group) is not _Group
        backend = None if self._is_foreign else backend_on_host(group)
        self._wakefulness = wakefulness(group.size()) if backend is not None and backend.name() == "gloo" else None

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def world_size(self) -> int:
        return self.group.size()

    @property
    def store(self) -> dist.Store | None:
        _, store = dist.distributed_c10d._world.pg_map.get(self.group, (None, None))
        return store

    @property
    def waits_again(self) -> bool:
        return dist.get_backend(self.group) == "gloo"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        try:
            return torch.empty(numel, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"Rank {self.rank} found no room for a bucket of {numel * dtype.itemsize:,} bytes on {device}. All "
                f"buckets together take as much as the gradients: gradient_as_bucket_view=True saves that much, a "
                f"smaller batch makes room. {error}"
            ) from error

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        wakefulness = self._wakefulness_for(tensor)
        work = _Group.allreduce(self.group, [tensor])
        return _ForeignWork(work, tensor) if self._is_foreign else _waited_for(work, wakefulness)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        wakefulness = self._wakefulness_for(tensor)
        return _waited_for(_Group.broadcast(self.group, tensor, source), wakefulness)

    def _wakefulness_for(self, tensor: torch.Tensor) -> Wakefulness | None:
        """Of who waits for `tensor`, which is not under way yet: gloo's threads give a sparse one other values."""
        if self._wakefulness is None or tensor.device.type != "cpu":
            return None
        message = tensor._values() if tensor.is_sparse else tensor
        return self._wakefulness if message.nbytes <= LARGEST_AWAKE_BYTES else None

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        _Group.allgather(self.group, [gathered], [tensor]).wait()
        return gathered


def _waited_for(work: dist.Work, wakefulness: Wakefulness | None) -> Work:
    return work if wakefulness is None else _AwakeWork(work, wakefulness)


class _AwakeWork:
    """Of gloo, waited for as [Note: waiting awake] has it."""

    def __init__(self, work: dist.Work, wakefulness: Wakefulness):
        self._work = work
        self._wakefulness = wakefulness
        self.is_completed = work.is_completed
        self.get_future = work.get_future

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        if timeout is None:
            self._wakefulness.stay_awake(self.is_completed)
            self._work.wait()
        else:
            self._wakefulness.stay_awake(self.is_completed, timeout.total_seconds())
            self._work.wait(timeout)


class _ForeignWork:
    """Of a group that is written in Python: the result is what its future holds, perhaps another tensor."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor):
        self._work = work
        self._tensor = tensor

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        result = self._work.get_future().wait()
        tensor = result[0] if isinstance(result, (list, tuple)) else result
        if tensor is not self._tensor:
            self._tensor.copy_(tensor)

    def is_completed(self) -> bool:
        return self._work.is_completed()


def backend_on_host(group: dist.ProcessGroup) -> Backend | None:
    """What carries the group's tensors on the CPU, if anything does."""
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
