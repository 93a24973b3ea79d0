"""Transport over `torch.distributed`: whatever backend the process group has (gloo, NCCL, ...)."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.constants import default_pg_timeout

from minddp.transport.protocols import Work
from minddp.transport.spin_wait import SpinWait, spin_wait_among

_Group = dist.ProcessGroup
MAX_SPIN_BYTES = 4 * 2**20  # see [Note: spin wait]


class ProcessGroupTransport:
    """Calls the process group's own methods.

    `torch.distributed.all_reduce` and its siblings call them too, after some twenty microseconds of checks and
    logging in Python, which a model with many buckets would pay many times in every step. The methods are taken
    from the base class, which also gives a group written in Python the options that it expects.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = group.rank()
        self.world_size = group.size()
        self.store: dist.Store | None = dist.distributed_c10d._world.pg_map.get(group, (None, None))[1]
        self._is_python_group = type(group) is not _Group
        backend = None if self._is_python_group else backend_for(group, torch.device("cpu"))
        self._spin_wait = (
            spin_wait_among(self.world_size) if backend is not None and backend.name() == "gloo" else None
        )

    @property
    def waits_again(self) -> bool:
        return dist.get_backend(self.group) == "gloo"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        try:
            return torch.empty(numel, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"Rank {self.rank} is out of memory for a bucket of {numel * dtype.itemsize:,} bytes on {device}. "
                f"All buckets together take as much as the gradients: gradient_as_bucket_view=True saves that "
                f"much, and a smaller batch also helps. {error}"
            ) from error

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        spin_wait = self._spin_wait_for(tensor)
        work = _Group.allreduce(self.group, [tensor])
        return _PythonGroupWork(work, tensor) if self._is_python_group else _spinning(work, spin_wait)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        spin_wait = self._spin_wait_for(tensor)
        return _spinning(_Group.broadcast(self.group, tensor, source), spin_wait)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        _Group.allgather(self.group, [gathered], [tensor]).wait()
        return gathered

    def _spin_wait_for(self, tensor: torch.Tensor) -> SpinWait | None:
        """Must be called before the launch: gloo's threads replace the values of a sparse tensor."""
        if self._spin_wait is None or tensor.device.type != "cpu":
            return None
        message = tensor._values() if tensor.is_sparse else tensor
        return self._spin_wait if message.nbytes <= MAX_SPIN_BYTES else None


def _spinning(work: dist.Work, spin_wait: SpinWait | None) -> Work:
    return work if spin_wait is None else _SpinningWork(work, spin_wait)


class _SpinningWork:
    """A work of gloo that spins before it sleeps. See [Note: spin wait]."""

    def __init__(self, work: dist.Work, spin_wait: SpinWait):
        self._work = work
        self._spin_wait = spin_wait
        self.is_completed = work.is_completed
        self.get_future = work.get_future

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        limit = () if timeout is None else (timeout,)
        self._spin_wait.spin(self.is_completed, *(each.total_seconds() for each in limit))
        self._work.wait(*limit)


class _PythonGroupWork:
    """A work of a group written in Python: the result is in its future, perhaps in another tensor."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor):
        self._work = work
        self._tensor = tensor
        self.is_completed = work.is_completed

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        result = self._work.get_future().wait()
        tensor = result[0] if isinstance(result, (list, tuple)) else result
        if tensor is not self._tensor:
            self._tensor.copy_(tensor)


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Backend | None:
    """The group's backend for tensors on `device`, if it has one."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def time_limit_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The limit of the group's collectives, or torch's default where the backend does not report it."""
    options = getattr(backend_for(group, device), "options", None)
    return getattr(options, "_timeout", default_pg_timeout).total_seconds()
