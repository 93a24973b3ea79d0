"""The transport: memory for the buckets, all-reduces in it, small broadcasts. The process group does the rest."""

from __future__ import annotations

import weakref
from collections import deque

import torch
import torch.distributed as dist

from minddp.transport.process_group import ProcessGroupTransport, backend_for, time_limit_s
from minddp.transport.protocols import AdditionOrder, Work
from minddp.transport.shared_memory import segments
from minddp.transport.shared_memory.host_communicator import HostCommunicator
from minddp.transport.shared_memory.messages import DTYPES, MAX_BROADCAST_BYTES, SegmentCreated, SegmentDropped
from minddp.transport.shared_memory.rendezvous import CannotConnect, connect, require_one_host
from minddp.transport.shared_memory.segments import Segment
from minddp.transport.shared_memory.shared_work import ProgressEngine, SharedWork
from minddp.transport.spin_wait import spin_wait_among

CONNECT_TIMEOUT_S = 30.0


def connect_ranks(group: ProcessGroupTransport, device: torch.device) -> SharedMemoryTransport:
    """The transport between the ranks of `group`, for tensors on `device`. Collective.

    Raises:
        CannotConnect: they cannot share memory. On every rank, with the same reason.
    """
    require_gloo(group, device)
    if group.world_size == 1:
        raise CannotConnect("there is only one rank")
    require_one_host(group)
    peers = connect(group, range(group.world_size), CONNECT_TIMEOUT_S)
    timeout_s, spin_wait = time_limit_s(group.group, device), spin_wait_among(group.world_size)
    return SharedMemoryTransport(group, HostCommunicator(group.rank, peers, timeout_s, spin_wait=spin_wait))


def require_gloo(group: ProcessGroupTransport, device: torch.device) -> None:
    """Raises `CannotConnect` unless sums in shared memory have the same bits as the group's."""
    if device.type != "cpu":
        raise CannotConnect(f"the tensors are on {device}, not in the memory of the host")
    if type(group.group) is not dist.ProcessGroup:
        raise CannotConnect(f"{type(group.group).__name__} may have an all-reduce of its own")
    backend = backend_for(group.group, device)
    if backend is None or backend.name() != "gloo":
        raise CannotConnect("on the CPU the group does not use gloo, and another backend may add in another order")


class SharedMemoryTransport(ProcessGroupTransport):
    """All-reduces tensors of `allocate` in place, and others as copies. Small broadcasts go through sockets.

    Its threads end with the group. Later calls use the group's backend, which may still work, as in torch.
    """

    waits_again = True

    def __init__(self, group: ProcessGroupTransport, communicator: HostCommunicator):
        super().__init__(group.group)
        self._communicator = communicator
        self.adds_after_s = communicator.progress_delay_s
        self._engine = ProgressEngine(communicator)
        self._group_end = self.when_group_ends(self._engine.end)

        self._segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()  # by address
        self._num_created = 0
        self._dropped: deque[int] = deque()  # numbers of freed segments that the peers have not unmapped yet
        self._idle: list[Segment] = []  # for copies

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu" or numel == 0 or not self._engine.end.alive:
            return super().allocate(numel, dtype, device)
        with torch.inference_mode(False):  # so that the progress thread may write to it
            return segments.tensor_over(self._create_segment(numel * dtype.itemsize), dtype, numel)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._reduce_in_memory(tensor) or super().all_reduce(tensor)

    def sum_in_order(self, tensor: torch.Tensor, order: AdditionOrder) -> Work | None:
        return self._reduce_in_memory(tensor, order)

    def _reduce_in_memory(self, tensor: torch.Tensor, order: AdditionOrder | None = None) -> Work | None:
        """`None` if the tensor is not supported."""
        if not (self._supports(tensor) and tensor.dtype in DTYPES and tensor.numel() > 0):
            return None
        while self._dropped:
            self._communicator.announce(SegmentDropped(self._dropped.popleft()))
        address = tensor.untyped_storage().data_ptr()
        segment = self._segments.get(address)
        if segment is None or not tensor.is_contiguous():
            return self._all_reduce_copy(tensor.detach(), order)
        offset_bytes = tensor.data_ptr() - address
        pending = self._communicator.launch(tensor.detach().view(-1), segment, offset_bytes, order=order)
        return SharedWork(pending, self._engine)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        is_plain = self._supports(tensor) and not tensor.is_quantized
        if not (is_plain and 0 < tensor.nbytes <= MAX_BROADCAST_BYTES):
            return super().broadcast(tensor, source)
        if self.rank == source:
            return SharedWork(self._communicator.broadcast(tensor.detach()), self._engine)
        return SharedWork(self._communicator.receive_broadcast(tensor.detach(), source), self._engine)

    def _supports(self, tensor: torch.Tensor) -> bool:
        """Equal on every rank, since it depends only on properties that any collective requires to be equal."""
        return tensor.layout is torch.strided and tensor.device.type == "cpu" and self._engine.end.alive

    def _all_reduce_copy(self, tensor: torch.Tensor, order: AdditionOrder | None) -> Work:
        segment = self._idle_segment(tensor.nbytes)
        with torch.inference_mode(False):
            flat = segments.tensor_over(segment, tensor.dtype, tensor.numel())
        flat.view(tensor.shape).copy_(tensor)

        pending = self._communicator.launch(flat, segment, 0, copy_to=tensor, order=order)
        idle = self._idle  # a reference to `self` would keep the transport alive while the collective is in flight
        pending.future.add_done_callback(lambda _: idle.append(segment))
        return SharedWork(pending, self._engine)

    def _create_segment(self, nbytes: int) -> Segment:
        """A new segment, known to all peers. When it is freed here, they unmap it."""
        created = SegmentCreated(self._num_created, nbytes)
        self._num_created += 1
        try:
            descriptor = segments.create(nbytes)
            self._communicator.announce(created, [descriptor])
            segment = segments.attach(descriptor, nbytes, created.number)
        except OSError as error:
            raise RuntimeError(
                f"Rank {self.rank} has no room for {nbytes:,} bytes of shared memory ({error}). Free some, or "
                f'pass transport="process_group".'
            ) from error
        self._segments[segments.tensor_over(segment, torch.uint8, 1).data_ptr()] = segment
        weakref.finalize(segment, self._dropped.append, created.number).atexit = False
        return segment

    def _idle_segment(self, nbytes: int) -> Segment:
        """The smallest idle segment that is large enough, or a new one, which replaces one that is too small."""
        large_enough = [segment for segment in self._idle if len(segment) >= nbytes]
        if not large_enough:
            del self._idle[:1]
            return self._create_segment(nbytes)
        smallest = min(large_enough, key=len)
        self._idle.remove(smallest)
        return smallest
