"""Transport over `torch.distributed`, by any backend of the process group (gloo, NCCL, ...)."""

from __future__ import annotations

import datetime
import sys
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.constants import default_pg_timeout

from minddp.platform.store import connection_for_messages
from minddp.transport.protocols import Work
from minddp.transport.spin_wait import SpinWait, spin_wait_among

_Group = dist.ProcessGroup
MAX_SPIN_BYTES = 4 * 2**20  # see [Note: spin wait]


class ProcessGroupTransport:
    """Calls the methods of the process group.

    `torch.distributed.all_reduce` calls them after some twenty microseconds of checks and logging in Python. The
    methods of the base class also pass the options that a group written in Python expects.
    """

    adds_after_s = 0.0

    def __init__(self, group: dist.ProcessGroup, topic: str = "minddp"):
        self.group = group
        self.rank = group.rank()
        self.world_size = group.size()
        store = _registered_store(group)
        self.store = _store_for_messages(group, topic)
        self.group_store = None if store is None else dist.PrefixStore(topic, store)  # may be the server
        self._is_python_group = type(group) is not _Group
        backend = None if self._is_python_group else backend_for(group, torch.device("cpu"))
        is_gloo = backend is not None and backend.name() == "gloo"
        self._spin_wait = spin_wait_among(self.world_size) if is_gloo else None

    @property
    def waits_again(self) -> bool:
        return dist.get_backend(self.group) == "gloo"

    def when_group_ends(self, end: Callable[[], object]) -> object:
        # Torch has no hook for `destroy_process_group`. But its registry has the only reference to the Python
        # object of a group's store, and drops it there. `group_store` is another object of the same store.
        store = _registered_store(self.group)
        at_exit = sys.is_finalizing  # then modules that `end` uses may be gone
        return None if store is None else weakref.ref(store, lambda _: at_exit() or end())

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        try:
            return torch.empty(numel, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"Rank {self.rank} is out of memory for a bucket of {numel * dtype.itemsize:,} bytes on {device}. "
                f"All buckets together are as large as the gradients: pass gradient_as_bucket_view=True to save "
                f"that much, or use a smaller batch. {error}"
            ) from error

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        spin_wait = self._spin_wait_for(tensor)
        work = _Group.allreduce(self.group, [tensor])
        if self._is_python_group:
            return _PythonGroupWork(work, tensor)
        return work if spin_wait is None else _SpinningWork(work, spin_wait)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        spin_wait = self._spin_wait_for(tensor)
        work = _Group.broadcast(self.group, tensor, source)
        return work if spin_wait is None else _SpinningWork(work, spin_wait)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        _Group.allgather(self.group, [gathered], [tensor]).wait()
        return gathered

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, sizes_in: Sequence[int], sizes_out: Sequence[int]
    ) -> Work:
        return _Group.alltoall_base(self.group, received, sent, list(sizes_in), list(sizes_out))

    def _spin_wait_for(self, tensor: torch.Tensor) -> SpinWait | None:
        """Call it before the launch: gloo's threads replace the values of a sparse tensor."""
        if self._spin_wait is None or tensor.device.type != "cpu":
            return None
        message = tensor._values() if tensor.is_sparse else tensor
        return self._spin_wait if message.nbytes <= MAX_SPIN_BYTES else None


class _SpinningWork:
    """A gloo `Work` whose `wait` polls before it blocks. See [Note: spin wait]."""

    def __init__(self, work: dist.Work, spin_wait: SpinWait):
        self._work = work
        self._spin_wait = spin_wait
        self.is_completed = work.is_completed
        self.get_future = work.get_future

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        limit = () if timeout is None else (timeout,)
        self._spin_wait.spin(self.is_completed, *map(datetime.timedelta.total_seconds, limit))
        self._work.wait(*limit)


class _PythonGroupWork:
    """The `Work` of a process group implemented in Python. Its future holds the result, perhaps another tensor."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor):
        self._work = work
        self._tensor = tensor
        self.is_completed = work.is_completed

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        result = self._work.get_future().wait()
        tensor = result[0] if isinstance(result, (list, tuple)) else result
        if tensor is not self._tensor:
            self._tensor.copy_(tensor)


def _registered_store(group: dist.ProcessGroup) -> dist.Store | None:
    """`None` for a group that torch did not make."""
    return dist.distributed_c10d._world.pg_map.get(group, (None, None))[1]


def _store_for_messages(group: dist.ProcessGroup, topic: str) -> dist.Store | None:
    """`None` also for a store that cannot carry messages, such as that of torch's "fake" backend."""
    if (store := _registered_store(group)) is None:
        return None
    try:
        return dist.PrefixStore(topic, connection_for_messages(store))
    except RuntimeError as error:
        if "pure virtual" not in str(error):
            raise
        return None


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Backend | None:
    """The group's backend for tensors on `device`, if it has one."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def time_limit_s(backend: object) -> float:
    """The limit of the collectives of a backend, or torch's default where it does not report it."""
    options = getattr(backend, "options", None)
    return getattr(options, "_timeout", default_pg_timeout).total_seconds()
