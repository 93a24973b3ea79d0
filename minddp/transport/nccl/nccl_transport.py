"""The NCCL calls for each collective: the transport, and how it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from minddp.transport.nccl.communicator import Communicator, NcclWork, join
from minddp.transport.nccl.unique_id import Introduction, nccl_host, share_unique_id
from minddp.transport.process_group import ProcessGroupTransport, time_limit_s
from minddp.transport.protocols import Work

CONNECT_TIMEOUT_S = 60.0
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

    Raises:
        ValueError: the tensors are not on an NVIDIA GPU, or several ranks use one GPU.
        RuntimeError: some rank has no CuPy or one for another CUDA than torch's, the group has no store, or not all
            ranks came, or NCCL could not connect them. On every rank, naming those.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        raise ValueError(
            f'transport="nccl" adds up on NVIDIA GPUs, but the module is on {device}. Move it to a GPU before '
            f'wrapping it, or pass transport="process_group".'
        )
    if group.store is None:
        raise RuntimeError(
            'transport="nccl" needs the store of the process group for its ranks to connect, and this group has '
            'none. Pass transport="process_group".'
        )
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    cupy, nccl, ours = _import_nccl(device)
    unique_id = share_unique_id(
        group.store, group, ours, lambda: _to_bytes(nccl.get_unique_id()), CONNECT_TIMEOUT_S
    )
    on_device = partial(cupy.cuda.Device, device.index)
    make_handle = partial(nccl.NcclCommunicator, group.world_size, _to_cupy(unique_id, cupy), group.rank)
    handle = join(make_handle, on_device, CONNECT_TIMEOUT_S)
    return NcclTransport(group, nccl, Communicator(handle, device, on_device, time_limit_s(group.group, device)))


class NcclTransport(ProcessGroupTransport):
    """All-reduces, broadcasts and all-gathers by NCCL, on a stream of its own.

    What NCCL does not support (sparse tensors, tensors on the CPU, booleans) is left to the process group.
    """

    waits_again = False  # the device waits, not the host; see [Note: what no call can report]

    def __init__(self, group: ProcessGroupTransport, nccl: Any, communicator: Communicator):
        super().__init__(group.group)
        self._nccl = nccl
        self._communicator = communicator
        self._type_of = {dtype: getattr(nccl, name) for dtype, name in NCCL_TYPES.items() if hasattr(nccl, name)}

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        if not self._supports(tensor):
            return super().all_reduce(tensor)
        return self._launch("an all-reduce", "allReduce", tensor, tensor, self._nccl.NCCL_SUM)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        if not self._supports(tensor):
            return super().broadcast(tensor, source)
        return self._launch("a broadcast", "broadcast", tensor, tensor, source)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if not self._supports(tensor):
            return super().all_gather(tensor)
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        self._launch("an all-gather", "allGather", tensor, gathered).wait()
        return list(gathered)

    def _launch(
        self, operation: str, method: str, source: torch.Tensor, target: torch.Tensor, *options: int
    ) -> NcclWork:
        def enqueue(handle: Any, stream: int) -> None:
            addresses, kind = (source.data_ptr(), target.data_ptr()), self._type_of[source.dtype]
            getattr(handle, method)(*addresses, source.numel(), kind, *options, stream)

        dtype = str(source.dtype).removeprefix("torch.")
        described = f"{operation} of {source.numel():,} elements of {dtype}"
        return self._communicator.launch(described, {source, target}, enqueue)

    def _supports(self, tensor: torch.Tensor) -> bool:
        """Equal on every rank, since it depends only on what must be equal in any collective."""
        is_dense_here = tensor.device == self._communicator.device and tensor.layout is torch.strided
        return is_dense_here and tensor.dtype in self._type_of and tensor.is_contiguous()


def _import_nccl(device: torch.device) -> tuple[Any, Any, Introduction]:
    """CuPy, its binding of NCCL, and this rank's introduction; the modules are `None` if there is an obstacle."""
    try:
        cupy = import_cupy()
        from cupy.cuda import nccl
    except ImportError as error:
        return None, None, Introduction(obstacle=str(error))
    if not nccl.available:
        major = (torch.version.cuda or "").partition(".")[0]
        return None, None, Introduction(obstacle=f"CuPy finds no NCCL; pip install nvidia-nccl-cu{major}")
    return cupy, nccl, Introduction(nccl_host(), str(torch.cuda.get_device_properties(device).uuid))


def import_cupy() -> Any:
    """The module `cupy`.

    It shares a device's primary context with torch, so an address from `Tensor.data_ptr()` or `Stream.cuda_stream`
    means the same to either. But each brings kernels and libraries of its own, for one major version of CUDA.

    Raises:
        ImportError: torch is built without CUDA, CuPy is missing or cannot be loaded, or is made for another CUDA.
    """
    if torch.version.cuda is None:
        raise ImportError("this torch is built without CUDA; install torch for CUDA (pytorch.org has the command)")
    major = int(torch.version.cuda.partition(".")[0])
    extra = f"pip install 'minddp[cuda{major}]'"
    try:
        import cupy

        theirs = cupy.cuda.runtime.runtimeGetVersion() // 1000
    except ImportError as error:
        raise ImportError(f"CuPy is not installed, or cannot be loaded ({error}); {extra}") from error
    if theirs != major:
        raise ImportError(
            f"CuPy is made for CUDA {theirs} and torch for CUDA {major}; "
            f"pip uninstall cupy-cuda{theirs}x, then {extra}"
        )
    return cupy


def _to_bytes(unique_id: bytes | tuple[int, ...]) -> bytes:
    """Before CuPy 14 it is a tuple of C chars, which are signed."""
    return unique_id if isinstance(unique_id, bytes) else bytes(byte & 0xFF for byte in unique_id)


def _to_cupy(unique_id: bytes, cupy: Any) -> bytes | tuple[int, ...]:
    if int(cupy.__version__.partition(".")[0]) >= 14:
        return unique_id
    return tuple(byte - 256 if byte > 127 else byte for byte in unique_id)
