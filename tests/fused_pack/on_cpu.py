"""The kernel's own source, compiled for the CPU: blocks and threads one after another.

What a GPU would do at the same time is done in a row, so this shows wrong indices and wrong arithmetic, not races;
each element is written by one thread only, which `test_kernel.py` checks. Accesses to vectors that are not aligned
are reported by the compiler's sanitizer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from minddp.fused_pack.kernel import BODY, CONVERSIONS

COMPILER = shutil.which("g++")

_AROUND = r"""
#define __global__
#define __device__ static inline
#define __grid_constant__
#define __launch_bounds__(threads)
struct Dim { unsigned x; };
static Dim blockIdx, threadIdx;
%(conversions)s
__device__ float widened(F16 x) { _Float16 y; __builtin_memcpy(&y, &x, 2); return (float)y; }
__device__ void narrow(float x, F16& y) { _Float16 z = (_Float16)x; __builtin_memcpy(&y, &z, 2); }
__device__ float widened(BF16 x) {
    unsigned bits = (unsigned)x.bits << 16; float y; __builtin_memcpy(&y, &bits, 4); return y;
}
__device__ void narrow(float x, BF16& y) {
    unsigned bits; __builtin_memcpy(&bits, &x, 4);
    y.bits = x != x ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
__device__ void narrow(double x, float& y) { y = (float)x; }
__device__ void narrow(float x, double& y) { y = x; }
__device__ float product(float x, float y) { return x * y; }
%(body)s
extern "C" void run(unsigned first, unsigned stop, const Addresses* grads, BUCKET* bucket, const Chunk* chunks,
                    FACTOR factor, int scales) {
    for (blockIdx.x = first; blockIdx.x < stop; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            move_chunks(*grads, bucket, chunks, factor, scales);
}
"""


@functools.cache
def library(options: tuple[str, ...]) -> Any:
    """The kernel with these definitions. The directory goes when the process does."""
    assert COMPILER is not None, "tests that need it are skipped without"
    directory = Path(tempfile.mkdtemp(prefix="minddp-kernel-"))
    source, target = directory / "kernel.cpp", directory / "kernel.so"
    source.write_text(_AROUND % {"conversions": CONVERSIONS, "body": BODY})
    flags = ["-std=c++17", "-O1", "-fwrapv", "-fsanitize=alignment", "-w", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, *options, str(source), "-o", str(target)], check=True, timeout=100)
    loaded = ctypes.CDLL(str(target))
    shutil.rmtree(directory)
    factor = ctypes.c_double if "-DFACTOR=double" in options else ctypes.c_float
    pointer = ctypes.c_void_p
    loaded.run.argtypes = [ctypes.c_uint, ctypes.c_uint, pointer, pointer, pointer, factor, ctypes.c_int]
    return loaded


class CuPyOnCpu:
    """As much of `cupy` as the packer uses."""

    class cuda:
        @staticmethod
        def Device(index: object) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    launches: int = 0

    def RawKernel(self, code: str, name: str, options: tuple[str, ...]) -> _Kernel:
        assert code == CONVERSIONS + BODY
        assert re.search(rf'extern "C" __global__ .*{name}\(', code)
        return _Kernel(self, options)


class _Kernel:
    def __init__(self, cupy: CuPyOnCpu, options: tuple[str, ...]):
        self._cupy = cupy
        self._options = options

    def compile(self) -> None:
        library(self._options)

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...], *, stream: Any) -> None:
        """As CuPy passes arguments: an array of one element is passed by value, a number in its own dtype."""
        addresses, bucket, chunks, factor, scales = args
        assert isinstance(addresses, np.ndarray)
        assert addresses.size == 1
        assert [bucket.dtype, chunks.dtype, scales.dtype] == [np.uint64, np.uint64, np.int32]
        assert factor.dtype == (np.float64 if "-DFACTOR=double" in self._options else np.float32)
        assert addresses.nbytes + 8 + 8 + factor.nbytes + 4 <= 4096, "more than a kernel's arguments may take"
        assert isinstance(stream.ptr, int)
        assert f"-DTHREADS={block[0]}" in self._options
        self._cupy.launches += 1
        by_value = addresses.copy()
        library(self._options).run(0, grid[0], by_value.ctypes.data, int(bucket), int(chunks), factor, scales)
