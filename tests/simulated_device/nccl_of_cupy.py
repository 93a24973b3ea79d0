"""NCCL as minddp calls it through CuPy: addresses and a stream come in, gloo computes the values at once."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from minddp.transport.nccl.communicator import Communicator
from minddp.transport.nccl.nccl_transport import NCCL_TYPES, NcclTransport
from minddp.transport.process_group import ProcessGroupTransport
from tests.simulated_device.device import Place, SimulatedDevice


class NcclOfCupy:
    """What CuPy calls an `NcclCommunicator`, and its module: types are torch's own, gloo computes the values."""

    NCCL_SUM = None

    def __init__(self, device: SimulatedDevice, group: dist.ProcessGroup):
        self._device, self._group = device, group
        for dtype, name in NCCL_TYPES.items():
            setattr(self, name, dtype)

    def allReduce(self, at: int, to: int, count: int, dtype: torch.dtype, _sum: None, stream: int) -> None:
        total = array(to, count, dtype)
        self._run(stream, [total], lambda: self._group.allreduce([total]))

    def broadcast(self, at: int, to: int, count: int, dtype: torch.dtype, root: int, stream: int) -> None:
        sent = array(to, count, dtype)
        self._run(stream, [sent], lambda: self._group.broadcast(sent, root))

    def allGather(self, at: int, to: int, count: int, dtype: torch.dtype, stream: int) -> None:
        own, all_ranks = array(at, count, dtype), array(to, count * self._group.size(), dtype)
        parts = list(all_ranks.chunk(self._group.size()))
        self._run(stream, [own, all_ranks], lambda: self._group.allgather([parts], [own]))

    def _run(self, stream: int, arrays: Sequence[torch.Tensor], call: Callable[[], dist.Work]) -> None:
        with _disable_current_modes():
            call().wait()
        places = [place_at(self._device, array.data_ptr(), array.nbytes) for array in arrays]
        self._device.run("a call of NCCL", self._device.streams[stream], [], places)

    def check_async_error(self) -> None: ...

    def abort(self) -> None: ...

    def destroy(self) -> None: ...


def array(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory that is there."""
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    with _disable_current_modes():
        return torch.frombuffer(memory, dtype=dtype)


def place_at(device: SimulatedDevice, address: int, nbytes: int) -> Place:
    for memory in device.memory.values():
        if memory.address <= address and address + nbytes <= memory.address + memory.nbytes:
            return memory, address - memory.address, address - memory.address + nbytes
    raise AssertionError(f"there are no {nbytes} bytes of live memory at address {address}")


def connect_gpus(device: SimulatedDevice, group: ProcessGroupTransport) -> NcclTransport:
    """minddp's transport over NCCL, as its function of that name opens it, but with this NCCL."""
    cupy = NcclOfCupy(device, group.group)
    communicator = Communicator(cupy, torch.device("cpu"), contextlib.nullcontext, limit_s=60.0)
    return NcclTransport(group, cupy, communicator)
