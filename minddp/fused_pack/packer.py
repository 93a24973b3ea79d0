"""Which bucket gets a fused pack, and how it is launched."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from minddp.cupy_beside_torch import NoCuPy, import_cupy
from minddp.fused_pack.chunks import CHUNK, TENSORS_PER_LAUNCH, THREADS, Launch, lay_out, vector_elements
from minddp.fused_pack.kernel import NAMES_IN_C, compiled, factor_dtype

_log = logging.getLogger(__name__)


def fused_pack_is_wanted() -> bool:
    """Whether the environment variable MINDDP_FUSED_PACK is 1: the kernel has not run on a GPU yet."""
    return os.environ.get("MINDDP_FUSED_PACK") == "1"


def fused_pack_of(views: Sequence[torch.Tensor], grad_dtype: torch.dtype) -> FusedPack | None:
    """One for these `views` of a bucket, to and from gradients of `grad_dtype`; `None` where torch's kernels do.

    That is where there is no GPU or no CuPy, where one kernel of torch's does the same (a single gradient), and for
    complex numbers.
    """
    is_floating = grad_dtype in NAMES_IN_C and views[0].dtype in NAMES_IN_C
    if views[0].device.type != "cuda" or len(views) < 2 or not is_floating:
        return None
    try:
        cupy = import_cupy()
    except NoCuPy as obstacle:
        _log.info("Gradients are packed by torch's kernels: %s.", obstacle)
        return None
    try:
        return FusedPack(cupy, views, grad_dtype)
    except Exception as error:
        _log.warning("Gradients are packed by torch's kernels, as CuPy's cannot be compiled: %s", error)
        return None


class FusedPack:
    """Moves gradients to and from their views of a bucket. See [Note: the table of addresses].

    The views are of one storage. Gradients lie as they do: of the same strides, and dense.
    """

    def __init__(self, cupy: Any, views: Sequence[torch.Tensor], grad_dtype: torch.dtype):
        self._memory = views[0].untyped_storage()  # where it lies may change: asked in each launch
        self._device, self._dtype = views[0].device, views[0].dtype
        self._strides = [view.stride() for view in views]
        self._grad_dtype = grad_dtype
        self._launches, self._chunks = _uploaded(
            tuple(view.numel() for view in views),
            tuple(int(view.storage_offset()) for view in views),
            vector_elements(grad_dtype.itemsize, self._dtype.itemsize),
            self._device,
        )
        self._addresses = np.zeros(TENSORS_PER_LAUNCH, np.uint64)
        self._by_value = self._addresses.view(np.dtype((np.void, self._addresses.nbytes)))
        self._on_device = partial(cupy.cuda.Device, self._device.index)
        with self._on_device():
            self._gather = compiled(cupy, grad_dtype, self._dtype, gathers=True)
            self._scatter = compiled(cupy, grad_dtype, self._dtype, gathers=False)

    @property
    def num_launches(self) -> int:
        """How many kernels a gather or a scatter takes."""
        return len(self._launches)

    def gather(self, grads: Sequence[torch.Tensor], factor: float | None, *, divides: bool = False) -> bool:
        """Fill the views with the gradients, times `factor` if given. Whether it could: strides may differ.

        With `divides` they are divided by it, as torch divides on a GPU. See [Note: the same bits as without].
        """
        if not self._lie_like_views(grads):
            return False
        multiplier = factor_of(factor, self._dtype, divides=divides)
        self._launch(self._gather, grads, multiplier, factor is not None)
        return True

    def scatter(self, grads: Sequence[torch.Tensor]) -> bool:
        """Copy the views into the gradients. Whether it could: strides may differ, and dtypes if it is cast."""
        if not self._lie_like_views(grads) or any(grad.dtype is not self._grad_dtype for grad in grads):
            return False
        self._launch(self._scatter, grads, factor_of(None, self._grad_dtype), False)
        return True

    def _lie_like_views(self, grads: Sequence[torch.Tensor]) -> bool:
        return [grad.stride() for grad in grads] == self._strides

    def _launch(self, kernel: Any, grads: Sequence[torch.Tensor], factor: np.floating[Any], scales: bool) -> None:
        """On the current stream, so that it is ordered as torch's own kernels are."""
        stream = _Stream(torch.cuda.current_stream(self._device).cuda_stream)
        bucket, scaling = np.uint64(self._memory.data_ptr()), (factor, np.int32(scales))
        with self._on_device():
            for launch in self._launches:
                addresses = [grad.data_ptr() for grad in grads[launch.first : launch.stop]]
                self._addresses[: len(addresses)] = addresses
                chunks = np.uint64(self._chunks.data_ptr() + launch.first_chunk * CHUNK.itemsize)
                num_blocks = launch.stop_chunk - launch.first_chunk
                if num_blocks:
                    arguments = (self._by_value, bucket, chunks, *scaling)
                    kernel((num_blocks,), (THREADS,), arguments, stream=stream)


@functools.lru_cache(maxsize=128)
def _uploaded(
    numels: tuple[int, ...], places: tuple[int, ...], elements_per_vector: int, device: torch.device
) -> tuple[tuple[Launch, ...], torch.Tensor]:
    """The launches, and the table of chunks on the device.

    Kept, since a bucket may take new memory in every step (somebody keeps the gradients), but not another layout.
    """
    layout = lay_out(numels, places, elements_per_vector)
    return layout.launches, torch.from_numpy(layout.chunks.view(np.uint8)).to(device)


@dataclass(frozen=True)
class _Stream:
    """What CuPy wants to know of a stream."""

    ptr: int


def factor_of(factor: float | None, written: torch.dtype, *, divides: bool = False) -> np.floating[Any]:
    """By what the kernel multiplies. See [Note: the same bits as without]."""
    precision = factor_dtype(written)
    if factor is None:
        return precision(1)
    return precision(1) / precision(factor) if divides else precision(factor)
