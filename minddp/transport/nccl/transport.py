"""Which NCCL calls are made for what: the transport, and how it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from minddp.platform.cupy_beside_torch import NoCuPy, import_cupy
from minddp.transport.nccl.communicator import Communicator, NcclWork, join
from minddp.transport.nccl.meeting import Introduction, meet
from minddp.transport.process_group import ProcessGroupTransport
from minddp.transport.protocols import Work

MEETING_LIMIT_S = 60.0
#: Names of NCCL's types in CuPy's binding. Complex numbers travel as pairs of real ones.
NCCL_TYPES = {
    torch.float32: "NCCL_FLOAT32",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.float16: "NCCL_FLOAT16",
    torch.float64: "NCCL_FLOAT64",
    torch.int64: "NCCL_INT64",
    torch.int32: "NCCL_INT32",
    torch.uint8: "NCCL_UINT8",
    torch.int8: "NCCL_INT8",
}


def connect_gpus(group: ProcessGroupTransport, device: torch.device) -> NcclTransport:
    """A communicator between the ranks of `group`, for tensors on `device`. Collective.

    The group itself may be of any backend, gloo for instance: only its store is used.

    Raises:
        ValueError: the tensors are not on an NVIDIA GPU, or several ranks have one card.
        RuntimeError: some rank has no CuPy or one for another CUDA than torch's, the group has no store, or not
            all ranks came, or NCCL could not connect them. On every rank, naming those.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        raise ValueError(
            f'transport="nccl" adds up on NVIDIA GPUs, but the module is on {device}. Move it to a GPU before '
            f'wrapping it, or pass transport="process_group".'
        )
    if group.store is None:
        raise RuntimeError(
            'transport="nccl" needs the store of the process group for its ranks to meet, and this group has none. '
            'Pass transport="process_group".'
        )
    device = torch.device("cuda", _index_of(device))
    cupy, nccl, ours = _library(device)
    unique_id = meet(
        group.store, group.rank, group.world_size, ours, lambda: _as_bytes(nccl.get_unique_id()), MEETING_LIMIT_S
    )
    on_device = partial(cupy.cuda.Device, device.index)
    handle = join(
        lambda: nccl.NcclCommunicator(group.world_size, _as_cupy_wants_it(unique_id, cupy), group.rank),
        on_device,
        MEETING_LIMIT_S,
    )
    return NcclTransport(group, nccl, Communicator(handle, device, on_device, _time_limit_s(group.group, device)))


class NcclTransport:
    """All-reduces, broadcasts and all-gathers by NCCL, on a stream of its own.

    What NCCL does not carry (sparse tensors, tensors on the CPU, booleans) is left to the process group.
    """

    waits_again = False  # waiting is the device's business; see [Note: what no call can tell]

    def __init__(self, group: ProcessGroupTransport, nccl: Any, communicator: Communicator):
        self._group = group
        self._nccl = nccl
        self._communicator = communicator
        self._type_of = {dtype: getattr(nccl, name) for dtype, name in NCCL_TYPES.items() if hasattr(nccl, name)}

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    @property
    def store(self) -> dist.Store | None:
        return self._group.store

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._group.allocate(numel, dtype, device)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        if not self._carries(tensor):
            return self._group.all_reduce(tensor)

        def enqueue(handle: Any, stream: int) -> None:
            place, numel = tensor.data_ptr(), tensor.numel()
            handle.allReduce(place, place, numel, self._type_of[tensor.dtype], self._nccl.NCCL_SUM, stream)

        return self._communicator.launch(f"an all-reduce of {_described(tensor)}", [tensor], enqueue)

    def all_reduce_together(self, tensors: Sequence[torch.Tensor], *, mean: bool = False) -> NcclWork:
        """Sum each of several tensors where it lies, by one launch: what a bucket is for, without packing.

        NCCL adds up the calls between groupStart and groupEnd in as few kernels as it can. For the `mean` see
        [Note: mean or sum].

        Raises:
            TypeError: one of them is nothing that NCCL carries.
        """
        for tensor in tensors:
            if not self._carries(tensor):
                raise TypeError(
                    f"NCCL adds up dense tensors of numbers on {self._communicator.device}, but was given "
                    f"{_described(tensor)} on {tensor.device}; leave it out of the group."
                )
        operation = self._nccl.NCCL_AVG if mean else self._nccl.NCCL_SUM

        def enqueue(handle: Any, stream: int) -> None:
            self._nccl.groupStart()
            try:
                for tensor in tensors:
                    place, numel = tensor.data_ptr(), tensor.numel()
                    handle.allReduce(place, place, numel, self._type_of[tensor.dtype], operation, stream)
            finally:
                self._nccl.groupEnd()

        return self._communicator.launch(f"an all-reduce of {len(tensors)} tensors", tensors, enqueue)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        if not self._carries(tensor):
            return self._group.broadcast(tensor, source)

        def enqueue(handle: Any, stream: int) -> None:
            place, numel = tensor.data_ptr(), tensor.numel()
            handle.broadcast(place, place, numel, self._type_of[tensor.dtype], source, stream)

        return self._communicator.launch(f"a broadcast of {_described(tensor)}", [tensor], enqueue)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if not self._carries(tensor):
            return self._group.all_gather(tensor)
        gathered = tensor.new_empty(self.world_size, *tensor.shape)

        def enqueue(handle: Any, stream: int) -> None:
            source, target = tensor.data_ptr(), gathered.data_ptr()
            handle.allGather(source, target, tensor.numel(), self._type_of[tensor.dtype], stream)

        self._communicator.launch(f"an all-gather of {_described(tensor)}", [tensor, gathered], enqueue).wait()
        return list(gathered)

    def _carries(self, tensor: torch.Tensor) -> bool:
        """The same on every rank, since it depends only on what must agree in any collective."""
        is_here = tensor.device == self._communicator.device
        return (
            is_here and tensor.layout is torch.strided and tensor.dtype in self._type_of and tensor.is_contiguous()
        )


# ------------------------------------------------------------------ opening


def _library(device: torch.device) -> tuple[Any, Any, Introduction]:
    """CuPy, its binding of NCCL, and what to tell the others; both `None` where there is an obstacle to tell of."""
    try:
        cupy = import_cupy()
        from cupy.cuda import nccl
    except (NoCuPy, ImportError) as error:
        return None, None, Introduction(obstacle=str(error))
    if not nccl.available:
        major = (torch.version.cuda or "").partition(".")[0]
        return None, None, Introduction(obstacle=f"CuPy finds no NCCL; pip install nvidia-nccl-cu{major}")
    return cupy, nccl, Introduction.of_device(device)


def _as_bytes(unique_id: bytes | tuple[int, ...]) -> bytes:
    """Until version 14 of CuPy it is a tuple of C chars, which are signed."""
    return unique_id if isinstance(unique_id, bytes) else bytes(byte & 0xFF for byte in unique_id)


def _as_cupy_wants_it(unique_id: bytes, cupy: Any) -> bytes | tuple[int, ...]:
    if int(cupy.__version__.partition(".")[0]) >= 14:
        return unique_id
    return tuple(byte - 256 if byte > 127 else byte for byte in unique_id)


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _time_limit_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The group's own, where its backend tells it."""
    try:
        options = getattr(group._get_backend(device), "options", None)
    except RuntimeError:  # it has no backend for this kind of device
        options = None
    return getattr(options, "_timeout", default_pg_timeout).total_seconds()


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.numel():,} elements of {str(tensor.dtype).removeprefix('torch.')}"
