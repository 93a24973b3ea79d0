"""The transport: memory for the buckets, all-reduces in it, small broadcasts; all else is the process group's."""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial

import torch
import torch.distributed as dist

from minddp.transport.process_group import ProcessGroupTransport, backend_for, time_limit_s
from minddp.transport.protocols import AdditionOrder, Work
from minddp.transport.shared_memory import segments
from minddp.transport.shared_memory.exchange import Exchange
from minddp.transport.shared_memory.messages import DTYPES, MAX_BROADCAST_BYTES, SegmentDropped, SegmentMade
from minddp.transport.shared_memory.rendezvous import CannotConnect, connect, require_one_host
from minddp.transport.shared_memory.segments import Segment
from minddp.transport.shared_memory.shared_work import ProgressEngine, SharedWork
from minddp.transport.spin_wait import spin_wait_among

CONNECT_TIMEOUT_S = 30.0


def connect_ranks(group: ProcessGroupTransport, device: torch.device) -> SharedMemoryTransport:
    """The transport between the ranks of `group`, for tensors on `device`. Collective.

    Raises:
        CannotConnect: they cannot share memory. On every rank, for the same reason.
    """
    require_gloo(group, device)
    if group.world_size == 1:
        raise CannotConnect("there is only one rank")
    require_one_host(group)
    peers = connect(group, range(group.world_size), CONNECT_TIMEOUT_S)
    timeout_s, spin_wait = time_limit_s(group.group, device), spin_wait_among(group.world_size)
    return SharedMemoryTransport(group, Exchange(group.rank, peers, timeout_s, spin_wait=spin_wait))


def require_gloo(group: ProcessGroupTransport, device: torch.device) -> None:
    """Raises `CannotConnect` unless sums in shared memory have the same bits as the group's."""
    if device.type != "cpu":
        raise CannotConnect(f"the tensors are on {device}, not in the memory of the host")
    if type(group.group) is not dist.ProcessGroup:
        raise CannotConnect(f"{type(group.group).__name__} may have an all-reduce of its own")
    backend = backend_for(group.group, device)
    if backend is None or backend.name() != "gloo":
        raise CannotConnect("on the CPU the group does not use gloo, whose order of addition is kept")


class SharedMemoryTransport(ProcessGroupTransport):
    """All-reduces tensors of `allocate` in place, and others as copies. Small broadcasts go through sockets.

    It ends with the group. What comes after that is left to the group's backend, which may still work, as in torch.
    """

    waits_again = True

    def __init__(self, group: ProcessGroupTransport, exchange: Exchange):
        super().__init__(group.group)
        self._exchange = exchange
        self.adds_after_s = exchange.progress_delay_s
        self._engine = ProgressEngine(exchange)
        self._group_end = self.when_group_ends(self._engine.end)
        self._segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()  # by address
        self._num_made = 0
        self._dropped: deque[int] = deque()  # numbers of segments without references, not yet sent to the peers
        self._idle: list[Segment] = []  # for copies

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu" or numel == 0 or not self._engine.end.alive:
            return super().allocate(numel, dtype, device)
        with torch.inference_mode(False):  # so that the progress thread may write to it
            return segments.tensor_over(self._make_segment(numel * dtype.itemsize), dtype, numel)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        return self._reduce_in_memory(tensor) or super().all_reduce(tensor)

    def sum_in_order(self, tensor: torch.Tensor, order: AdditionOrder) -> Work | None:
        return self._reduce_in_memory(tensor, order)

    def _reduce_in_memory(self, tensor: torch.Tensor, order: AdditionOrder | None = None) -> Work | None:
        """`None` if the tensor cannot be."""
        if not (self._may_carry(tensor) and tensor.dtype in DTYPES and tensor.numel() > 0):
            return None
        while self._dropped:
            self._exchange.announce(SegmentDropped(self._dropped.popleft()))
        address = tensor.untyped_storage().data_ptr()
        segment = self._segments.get(address)
        if segment is None or not tensor.is_contiguous():
            return self._all_reduce_copy(tensor.detach(), order)
        offset_bytes = tensor.data_ptr() - address
        reduction = self._exchange.launch(tensor.detach().view(-1), segment, offset_bytes, order=order)
        return SharedWork(reduction, self._engine)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        is_plain = self._may_carry(tensor) and not tensor.is_quantized
        if not (is_plain and 0 < tensor.nbytes <= MAX_BROADCAST_BYTES):
            return super().broadcast(tensor, source)
        if self.rank == source:
            return SharedWork(self._exchange.broadcast(tensor.detach()), self._engine)
        return SharedWork(self._exchange.receive_broadcast(tensor.detach(), source), self._engine)

    def _may_carry(self, tensor: torch.Tensor) -> bool:
        """Equal on every rank, as is all that decides how a tensor travels: it must be equal in any collective."""
        return tensor.layout is torch.strided and tensor.device.type == "cpu" and self._engine.end.alive

    def _all_reduce_copy(self, tensor: torch.Tensor, order: AdditionOrder | None) -> Work:
        segment = self._idle_segment(tensor.nbytes)
        with torch.inference_mode(False):
            flat = segments.tensor_over(segment, tensor.dtype, tensor.numel())
        flat.view(tensor.shape).copy_(tensor)

        reduction = self._exchange.launch(flat, segment, 0, copy_to=tensor, order=order)
        reduction.when_complete(partial(self._idle.append, segment))
        return SharedWork(reduction, self._engine)

    def _make_segment(self, nbytes: int) -> Segment:
        """A new one, known to all peers. See [Note: memory without a name]."""
        made = SegmentMade(self._num_made, nbytes)
        self._num_made += 1
        try:
            descriptor = segments.create(nbytes)
            self._exchange.announce(made, [descriptor])
            segment = segments.attach(descriptor, nbytes, made.number)
        except OSError as error:
            raise RuntimeError(
                f"Rank {self.rank} found no room for {nbytes:,} bytes of shared memory ({error}). Free some, or "
                f'pass transport="process_group".'
            ) from error
        self._segments[segments.tensor_over(segment, torch.uint8, 1).data_ptr()] = segment
        weakref.finalize(segment, self._dropped.append, made.number).atexit = False
        return segment

    def _idle_segment(self, nbytes: int) -> Segment:
        """The smallest that is large enough, or else a new one, which replaces one that is too small."""
        large_enough = [segment for segment in self._idle if len(segment) >= nbytes]
        if not large_enough:
            del self._idle[:1]
            return self._make_segment(nbytes)
        smallest = min(large_enough, key=len)
        self._idle.remove(smallest)
        return smallest
