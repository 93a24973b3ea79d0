"""The transport: memory for the buckets, all-reduces in it, small broadcasts; all else is the process group's."""

from __future__ import annotations

import datetime
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.constants import default_pg_timeout

from minddp.transport.process_group import ProcessGroupTransport, backend_on_host
from minddp.transport.protocols import Work
from minddp.transport.shared_memory import segments
from minddp.transport.shared_memory.attendance import Attendance
from minddp.transport.shared_memory.collective import Collective
from minddp.transport.shared_memory.exchange import Exchange
from minddp.transport.shared_memory.messages import DTYPES, LARGEST_TOLD_BYTES, SegmentDropped, SegmentMade
from minddp.transport.shared_memory.profiled import Name, Recorded, record_if_profiled
from minddp.transport.shared_memory.rendezvous import CannotConnect, connect
from minddp.transport.shared_memory.segments import Segment
from minddp.transport.spin_wait import wakefulness

CONNECT_TIMEOUT_S = 30.0


def connect_ranks(group: ProcessGroupTransport, device: torch.device) -> SharedMemoryTransport:
    """The transport between the ranks of `group`, for tensors on `device`. Collective.

    Raises:
        CannotConnect: they cannot share memory. On every rank, for the same reason.
    """
    backend = gloo_behind(group, device)
    if group.world_size == 1:
        raise CannotConnect("there is only one rank")
    peers = connect(group, CONNECT_TIMEOUT_S)
    exchange = Exchange(group.rank, peers, time_limit_s(backend), wakefulness=wakefulness(group.world_size))
    return SharedMemoryTransport(group, exchange)


def gloo_behind(group: ProcessGroupTransport, device: torch.device) -> Backend:
    """What adds up the group's tensors, if the same sums can be had in the memory of the host.

    Raises:
        CannotConnect: they cannot.
    """
    if device.type != "cpu":
        raise CannotConnect(f"the tensors are on {device}, not in the memory of the host")
    if type(group.group) is not dist.ProcessGroup:
        raise CannotConnect(f"{type(group.group).__name__} may have an all-reduce of its own")
    backend = backend_on_host(group.group)
    if backend is None or backend.name() != "gloo":
        raise CannotConnect("on the CPU the group does not use gloo, whose order of addition is kept")
    return backend


class SharedMemoryTransport:
    """All-reduces where the tensors lie, if `allocate` has made them; others are copied in and out.

    What is small and on the CPU is broadcast through the ranks' sockets: see [Note: broadcasts] in `hearing.py`.
    """

    def __init__(self, group: ProcessGroupTransport, exchange: Exchange):
        self._group = group
        self._exchange = exchange
        self._attendance = Attendance(exchange)
        self._segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()  # by address
        self._num_made = 0
        self._dropped: deque[int] = deque()  # numbers of segments that nobody here refers to any more
        self._idle: list[Segment] = []  # for tensors that lie elsewhere

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    @property
    def store(self) -> dist.Store | None:
        return self._group.store

    @property
    def waits_again(self) -> bool:
        return True

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._group.all_gather(tensor)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu" or numel == 0:
            return self._group.allocate(numel, dtype, device)
        return segments.tensor_over(self._make_segment(numel * dtype.itemsize), dtype, numel)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        if not _can_be_shared(tensor):
            return self._group.all_reduce(tensor)
        self._forget_dropped()
        address = tensor.untyped_storage().data_ptr()
        segment = self._segments.get(address)
        if segment is None or not tensor.is_contiguous():
            return self._all_reduce_a_copy(tensor.detach())
        return self._launch(tensor.detach().view(-1), segment, tensor.data_ptr() - address)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        if not _can_be_told(tensor):
            return self._group.broadcast(tensor, source)
        if self.rank == source:
            return self._tell(tensor.detach())
        return SharedWork(self._exchange.hear(tensor.detach(), source), self._attendance, "gloo:broadcast")

    def _tell(self, tensor: torch.Tensor) -> ToldWork:
        event = record_if_profiled("gloo:broadcast")
        try:
            self._exchange.tell(tensor)
        finally:
            if event is not None:
                event.end()
        return ToldWork(tensor, event)

    def _launch(self, flat: torch.Tensor, segment: Segment, offset_bytes: int) -> SharedWork:
        reduction = self._exchange.launch(flat, segment, offset_bytes)
        return SharedWork(reduction, self._attendance, "gloo:all_reduce")

    def _all_reduce_a_copy(self, tensor: torch.Tensor) -> Work:
        segment = self._idle_segment(tensor.nbytes)
        flat = segments.tensor_over(segment, tensor.dtype, tensor.numel())
        flat.view(tensor.shape).copy_(tensor)
        return CopiedWork(self._launch(flat, segment, 0), flat, tensor, segment, self._idle)

    # ------------------------------------------------------------------ memory

    def _forget_dropped(self) -> None:
        while self._dropped:
            self._exchange.forget(SegmentDropped(self._dropped.popleft()))

    def _make_segment(self, nbytes: int) -> Segment:
        """A new one, known to all peers. See [Note: memory without a name].

        Raises:
            RuntimeError: there is no room for it.
        """
        made = SegmentMade(self._num_made, nbytes)
        self._num_made += 1
        try:
            descriptor = segments.create(nbytes)
            self._exchange.introduce(descriptor, made)
            segment = segments.attach(descriptor, nbytes, made.number)
        except OSError as error:
            raise RuntimeError(
                f"Rank {self.rank} found no room for {nbytes:,} bytes of shared memory ({error}). Free some, or "
                f'pass transport="process_group".'
            ) from error
        self._segments[segment.address] = segment
        weakref.finalize(segment, self._dropped.append, made.number).atexit = False
        return segment

    def _idle_segment(self, nbytes: int) -> Segment:
        """The smallest that is large enough, or a new one instead of one that was too small."""
        large_enough = [segment for segment in self._idle if len(segment) >= nbytes]
        if large_enough:
            smallest = min(large_enough, key=len)
            self._idle.remove(smallest)
            return smallest
        if self._idle:
            self._idle.pop()
        return self._make_segment(nbytes)


class SharedWork:
    """A collective that this rank waits for; in profiles it has a name."""

    def __init__(self, collective: Collective, attendance: Attendance, name: Name):
        self._collective = collective
        self._attendance = attendance
        self._event = record_if_profiled(name)
        if self._event is not None:
            collective.when_landed(self._event.end)

    def is_completed(self) -> bool:
        return self._collective.has_landed

    def get_future(self) -> torch.futures.Future[Any]:
        """As that of torch's works: a list of the result."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._collective.when_landed(partial(_resolve, future, self._collective))
        return future

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Return once the result is there. One that has timed out goes on, and can be waited for again.

        Raises:
            RuntimeError: a peer is gone, or has made another call, or a time limit has passed.
        """
        limit_s = float("inf") if timeout is None else timeout.total_seconds()  # every collective has a deadline
        if not self._attendance.wait_for(self._collective, limit_s):
            raise RuntimeError(f"Timed out after {limit_s:g} s of waiting for {self._collective.name}.")
        if self._event is not None:
            self._event.wait()
        if self._collective.error is not None:
            raise RuntimeError(self._collective.error)


class CopiedWork:
    """The all-reduce of a tensor that lies elsewhere, by way of an otherwise idle segment."""

    def __init__(
        self, work: SharedWork, flat: torch.Tensor, tensor: torch.Tensor, segment: Segment, idle: list[Segment]
    ):
        self._work = work
        self._flat = flat
        self._tensor = tensor
        self._segment = segment
        self._idle = idle
        self._is_copied_back = False

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        self._work.wait(timeout)
        if not self._is_copied_back:
            self._is_copied_back = True
            self._tensor.copy_(self._flat.view(self._tensor.shape))
            self._idle.append(self._segment)


class ToldWork:
    """A broadcast on the rank that it is from: over, since what was to be told is on its way."""

    def __init__(self, tensor: torch.Tensor, event: Recorded | None):
        self._tensor = tensor
        self._event = event

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._tensor])
        return future

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        if self._event is not None:
            self._event.wait()


def _resolve(future: torch.futures.Future[Any], collective: Collective) -> None:
    if collective.error is None:
        future.set_result([collective.tensor])
    else:
        future.set_exception(RuntimeError(collective.error))


def _can_be_shared(tensor: torch.Tensor) -> bool:
    """The same on every rank, since it depends only on what must agree in any collective."""
    return _is_plain(tensor) and tensor.dtype in DTYPES and tensor.numel() > 0


def _can_be_told(tensor: torch.Tensor) -> bool:
    """The same on every rank, too."""
    return _is_plain(tensor) and not tensor.is_quantized and 0 < tensor.nbytes <= LARGEST_TOLD_BYTES


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


def time_limit_s(backend: Backend) -> float:
    """The group's own, where the backend tells it."""
    options = getattr(backend, "options", None)
    return getattr(options, "_timeout", default_pg_timeout).total_seconds()
