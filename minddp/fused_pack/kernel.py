"""The kernel: what a block of threads does with its chunk, in CUDA C++, and how it is compiled.

[Note: heads and vectors]
Sixteen bytes at a time are moved where the addresses allow it. Gradients begin at multiples of 512, but a bucket
has no gaps (its layout is torch's, element for element), so a gradient may go to any place. If both sides are
equally far from the next boundary, the few elements before it, the *head*, are moved one by one, then vectors, then
the rest. If not, all of the chunk is moved one by one, still with neighbouring threads at neighbouring elements.

The source includes no header, so that it compiles where the toolkit's headers are not installed.

[Note: denormal numbers]
CuPy compiles everything with `-ftz=true`, and puts that behind all options of ours: arithmetic in float32 then
takes denormal numbers for zero, and bfloat16 is float32 with fewer digits. Torch's kernels keep them. So what could
be flushed (a product, a conversion to or from float64) is written as the instruction that it is to be, which no
option changes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from minddp.fused_pack.chunks import TENSORS_PER_LAUNCH, THREADS, VECTORS_PER_THREAD, vector_elements

NAMES_IN_C = {torch.float32: "float", torch.float64: "double", torch.float16: "F16", torch.bfloat16: "BF16"}

#: Half precision as bits; arithmetic as the device does it, see [Note: denormal numbers]. A test compiles the rest
#: for the CPU.
CONVERSIONS = r"""
struct F16 { unsigned short bits; };
struct BF16 { unsigned short bits; };

#ifdef __CUDA_ARCH__
__device__ float widened(F16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ float widened(BF16 x) { return __uint_as_float((unsigned int)x.bits << 16); }
__device__ void narrow(float x, F16& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ void narrow(float x, BF16& y) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    unsigned int bits = __float_as_uint(x);
    y.bits = x != x ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
#endif
}
__device__ void narrow(double x, float& y) { asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x)); }
__device__ void narrow(float x, double& y) { asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x)); }
__device__ float product(float x, float y) {
    float z;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
#endif
"""

BODY = r"""
__device__ float widened(float x) { return x; }
__device__ double widened(double x) { return x; }
__device__ void narrow(float x, float& y) { y = x; }
__device__ void narrow(double x, double& y) { y = x; }
template <class Half> __device__ void narrow(double x, Half& y) {
    float between;
    narrow(x, between);
    narrow(between, y);
}
__device__ double product(double x, double y) { return x * y; }

template <class T> __device__ void convert(T x, T& y) { y = x; }  // bit by bit
template <class T, class U> __device__ void convert(T x, U& y) { narrow(widened(x), y); }

struct Addresses { unsigned long long of[TENSORS]; };
struct Chunk { long long start, place; int tensor, count; };
template <class T> struct alignas(VECTOR * sizeof(T)) Vector { T at[VECTOR]; };

__device__ TO converted(FROM x, FACTOR factor, int scales) {
    TO y;
    convert(x, y);
    if (scales) narrow(product(widened(y), factor), y);
    return y;
}

// How many elements come before the first at which both addresses are those of a vector; see the Note.
__device__ int head_of(const FROM* from, const TO* to, int count) {
    unsigned long long a = (unsigned long long)from / sizeof(FROM) % VECTOR;
    unsigned long long b = (unsigned long long)to / sizeof(TO) % VECTOR;
    int head = a == b ? (int)((VECTOR - a) % VECTOR) : count;
    return head < count ? head : count;
}

extern "C" __global__ void __launch_bounds__(THREADS) move_chunks(
    const __grid_constant__ Addresses grads, BUCKET* bucket, const Chunk* chunks, FACTOR factor, int scales
) {
    const Chunk chunk = chunks[blockIdx.x];
    GRAD* grad = (GRAD*)grads.of[chunk.tensor] + chunk.start;
#ifdef GATHER
    const FROM* __restrict__ from = grad;
    TO* __restrict__ to = bucket + chunk.place;
#else
    const FROM* __restrict__ from = bucket + chunk.place;
    TO* __restrict__ to = grad;
#endif
    constexpr int at_once = PER_THREAD;  // loads before the first store
    const int head = head_of(from, to, chunk.count);
    const int vectors = (chunk.count - head) / VECTOR;
    const int rest = head + vectors * VECTOR;

#pragma unroll at_once
    for (int i = threadIdx.x; i < head; i += THREADS) to[i] = converted(from[i], factor, scales);
#pragma unroll at_once
    for (int i = threadIdx.x; i < vectors; i += THREADS) {
        const Vector<FROM> read = reinterpret_cast<const Vector<FROM>*>(from + head)[i];
        Vector<TO> written;
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) written.at[k] = converted(read.at[k], factor, scales);
        reinterpret_cast<Vector<TO>*>(to + head)[i] = written;
    }
    for (int i = rest + threadIdx.x; i < chunk.count; i += THREADS) to[i] = converted(from[i], factor, scales);
}
"""


def options(grad: torch.dtype, bucket: torch.dtype, *, gathers: bool) -> tuple[str, ...]:
    """Definitions that make the source the kernel for these dtypes and this direction."""
    name_of_grad, name_of_bucket = NAMES_IN_C[grad], NAMES_IN_C[bucket]
    source, target = (name_of_grad, name_of_bucket) if gathers else (name_of_bucket, name_of_grad)
    definitions = {
        "GRAD": name_of_grad,
        "BUCKET": name_of_bucket,
        "FROM": source,
        "TO": target,
        "FACTOR": "double" if factor_dtype(bucket if gathers else grad) is np.float64 else "float",
        "TENSORS": TENSORS_PER_LAUNCH,
        "THREADS": THREADS,
        "PER_THREAD": VECTORS_PER_THREAD,
        "VECTOR": vector_elements(grad.itemsize, bucket.itemsize),
    }
    return (*(f"-D{key}={value}" for key, value in definitions.items()), *(["-DGATHER"] if gathers else []))


def factor_dtype(written: torch.dtype) -> type[np.floating[Any]]:
    """In which precision the target's elements are multiplied, as torch does."""
    return np.float64 if written is torch.float64 else np.float32


@functools.cache
def compiled(cupy: Any, grad: torch.dtype, bucket: torch.dtype, *, gathers: bool) -> Any:
    """A `cupy.RawKernel`, compiled for the current device.

    Raises:
        Exception: of CuPy's, if it cannot be compiled, for instance without NVRTC.
    """
    definitions = options(grad, bucket, gathers=gathers)
    kernel = cupy.RawKernel(CONVERSIONS + BODY, "move_chunks", options=definitions)
    kernel.compile()
    return kernel
