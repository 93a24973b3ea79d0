"""The transport over NCCL, and how its ranks connect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minddp.platform import wording
from minddp.platform.store import Messages
from minddp.platform.time_limits import call_with_limit
from minddp.transport.nccl.communicator import Communicator, OnDevice
from minddp.transport.process_group import ProcessGroupTransport, backend_for, time_limit_s
from minddp.transport.protocols import Transport, Work

CONNECT_TIMEOUT_S = 60.0
#: Names of NCCL's types in CuPy's binding.
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
        ValueError: the tensors are not on an NVIDIA GPU.
        RuntimeError: some rank has no CuPy or one for another CUDA than torch's, the group has no store, not all
            ranks came, or NCCL could not connect them. On every rank; names the ranks.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        raise ValueError(
            f'transport="nccl" adds on NVIDIA GPUs, but the module is on {device}. Move it to a GPU before '
            f'wrapping it, or pass transport="process_group".'
        )
    if group.store is None:
        raise RuntimeError(
            'The ranks of transport="nccl" connect through the store of the process group, and this group has '
            'none. Pass transport="process_group".'
        )
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    cupy: Any = None
    error_here = ""
    try:
        cupy = import_cupy()
        if not cupy.cuda.nccl.available:
            major = (torch.version.cuda or "").partition(".")[0]
            error_here = f"CuPy finds no NCCL; pip install nvidia-nccl-cu{major}"
    except ImportError as error:
        error_here = str(error)
    unique_id = share_unique_id(
        group.store, group, error_here, lambda: cupy.cuda.nccl.get_unique_id(), CONNECT_TIMEOUT_S
    )
    nccl = cupy.cuda.nccl
    on_device = partial(cupy.cuda.Device, device.index)
    make_handle = partial(nccl.NcclCommunicator, group.world_size, unique_id, group.rank)
    handle = call_on_device(make_handle, on_device, CONNECT_TIMEOUT_S)
    return NcclTransport(
        group, nccl, Communicator(handle, device, on_device, time_limit_s(backend_for(group.group, device)))
    )


class NcclTransport(ProcessGroupTransport):
    """All-reduces, broadcasts and all-gathers by NCCL, on a stream of its own.

    The process group handles the tensors that NCCL does not support: sparse ones, booleans, those on the CPU.
    """

    waits_again = False  # the device waits, not the host

    def __init__(self, group: ProcessGroupTransport, nccl: Any, communicator: Communicator):
        super().__init__(group.group)
        self._nccl = nccl
        self._communicator = communicator
        self._type_of = {dtype: getattr(nccl, name) for dtype, name in NCCL_TYPES.items() if hasattr(nccl, name)}

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        if not self._supports(tensor):
            return super().all_reduce(tensor)
        kind = self._type_of[tensor.dtype]
        return self._communicator.launch("allReduce", tensor, tensor, kind, self._nccl.NCCL_SUM)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        if not self._supports(tensor):
            return super().broadcast(tensor, source)
        return self._communicator.launch("broadcast", tensor, tensor, self._type_of[tensor.dtype], source)

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if not self._supports(tensor):
            return super().all_gather(tensor)
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        self._communicator.launch("allGather", tensor, gathered, self._type_of[tensor.dtype]).wait()
        return list(gathered)

    def _supports(self, tensor: torch.Tensor) -> bool:
        """Equal on every rank, since it depends only on properties that any collective requires to be equal."""
        is_dense_here = tensor.device == self._communicator.device and tensor.layout is torch.strided
        return is_dense_here and tensor.dtype in self._type_of and tensor.is_contiguous()


def share_unique_id(
    store: dist.Store, group: Transport, error_here: str, make_unique_id: Callable[[], Any], limit_s: float
) -> Any:
    """The unique id that rank 0 makes, bytes or a tuple of numbers, unless a rank has an error. Collective.

    Raises:
        RuntimeError: some ranks did not come within `limit_s` seconds, or one has an error. On every rank.
    """
    messages = Messages.open(store, "minddp/nccl", group.rank, group.world_size)
    messages.post(error_here, "error")
    for rank, error in enumerate(_posted(messages, "error", range(group.world_size), limit_s)):
        if error:
            raise RuntimeError(
                f'transport="nccl" cannot be used on rank {rank}: {error}. Or pass transport="process_group".'
            )
    if group.rank == 0:
        messages.post(make_unique_id(), "unique id")
    return _posted(messages, "unique id", [0], limit_s)[0]


def _posted(messages: Messages, key: str, ranks: Sequence[int], limit_s: float) -> list[Any]:
    """The messages of `ranks`, in their order."""
    posted = messages.gather(key, limit_s=limit_s, ranks=ranks)
    if missing := set(ranks) - posted.keys():
        raise RuntimeError(
            f'transport="nccl": no answer from {wording.ranks(list(missing))} within {limit_s:g} s. All ranks of '
            f"the group must wrap a module with this transport, in the same order. Look for an earlier error in "
            f"their logs."
        )
    return [posted[rank] for rank in ranks]


def call_on_device(make_handle: Any, on_device: OnDevice, limit_s: float) -> Any:
    """The result of `make_handle`, which waits for the last rank without a limit of its own.

    Raises:
        RuntimeError: it took longer than `limit_s` seconds, or NCCL refuses.
    """

    def call() -> Any:
        with on_device():
            return make_handle()

    try:
        return call_with_limit(call, limit_s)
    except TimeoutError as error:
        raise RuntimeError(
            f"All ranks came, but NCCL did not connect them within {limit_s:g} s. NCCL_DEBUG=INFO logs the network "
            f"that it tries; NCCL_SOCKET_IFNAME selects another one."
        ) from error
    except Exception as error:
        raise RuntimeError(
            f"NCCL did not connect the ranks: {error}. NCCL_DEBUG=WARN logs the reason. Each rank needs a GPU of "
            f"its own: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the module is moved."
        ) from error


def import_cupy() -> Any:
    """The module `cupy`.

    CuPy and torch share a device's primary context, so addresses from `Tensor.data_ptr()` and `Stream.cuda_stream`
    are valid in both. But each contains kernels and libraries of its own, for one major version of CUDA.

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
