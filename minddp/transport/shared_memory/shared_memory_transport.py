"""The transport: memory for the buckets, and all-reduces in it. The process group does the rest."""

from __future__ import annotations

import weakref
from collections import deque

import torch
import torch.distributed as dist

from minddp.transport.process_group import ProcessGroupTransport, backend_for, time_limit_s
from minddp.transport.protocols import Work
from minddp.transport.shared_memory import rendezvous, segments
from minddp.transport.shared_memory.host_communicator import HostCommunicator
from minddp.transport.shared_memory.messages import SegmentCreated, SegmentDropped
from minddp.transport.shared_memory.rendezvous import CannotConnect
from minddp.transport.shared_memory.segments import Segment
from minddp.transport.shared_memory.shared_work import ProgressEngine, SharedWork

CONNECT_TIMEOUT_S = 30.0
DTYPES = (  # of tensors that can be added in shared memory
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


def connect_ranks(group: ProcessGroupTransport, device: torch.device) -> SharedMemoryTransport:
    """The transport between the ranks of `group`, for tensors on `device`. Collective.

    Raises:
        CannotConnect: they cannot share memory. On every rank, with the same reason.
    """
    require_gloo(group, device)
    if group.world_size == 1:
        raise CannotConnect("there is only one rank")
    hosts = rendezvous.gather_hosts(group, rendezvous.name_of_host())
    for rank, host in enumerate(hosts):
        if host != hosts[0]:
            raise CannotConnect(
                f"rank {rank} is on another host than rank 0, or in a container with its own network"
            )
    peers = rendezvous.connect(group, range(group.world_size), CONNECT_TIMEOUT_S)
    communicator = HostCommunicator(group.rank, peers, time_limit_s(group.group, device))
    return SharedMemoryTransport(group, communicator)


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
    """All-reduces tensors of `allocate` in place, and others as copies.

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
        if not self._supports(tensor):
            return super().all_reduce(tensor)
        while self._dropped:
            self._communicator.announce(SegmentDropped(self._dropped.popleft()))
        tensor = tensor.detach()
        address = tensor.untyped_storage().data_ptr()
        segment = self._segments.get(address)
        if segment is None or not tensor.is_contiguous():
            return self._all_reduce_copy(tensor)
        all_reduce = self._communicator.launch(tensor.view(-1), segment, tensor.data_ptr() - address)
        return SharedWork(all_reduce, self._engine)

    def _supports(self, tensor: torch.Tensor) -> bool:
        """Equal on every rank, since it depends only on properties that any collective requires to be equal."""
        is_dense_here = tensor.layout is torch.strided and tensor.device.type == "cpu" and self._engine.end.alive
        return is_dense_here and tensor.dtype in DTYPES and tensor.numel() > 0

    def _all_reduce_copy(self, tensor: torch.Tensor) -> Work:
        segment = self._idle_segment(tensor.nbytes)
        with torch.inference_mode(False):  # so that the progress thread may write to it
            addend = segments.tensor_over(segment, tensor.dtype, tensor.numel())
        addend.view(tensor.shape).copy_(tensor)
        all_reduce = self._communicator.launch(addend, segment, 0, copy_to=tensor)
        idle = self._idle  # a reference to `self` would keep the transport alive while the all-reduce is in flight
        all_reduce.future.add_done_callback(lambda _: idle.append(segment))
        return SharedWork(all_reduce, self._engine)

    def _idle_segment(self, nbytes: int) -> Segment:
        """The smallest idle segment that is large enough, or a new one, which replaces one that is too small."""
        large_enough = [segment for segment in self._idle if len(segment) >= nbytes]
        if not large_enough:
            del self._idle[:1]
            return self._create_segment(nbytes)
        smallest = min(large_enough, key=len)
        self._idle.remove(smallest)
        return smallest

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
