"""Import CuPy beside torch, if both are built for the same major version of CUDA.

Both share a device's primary context, so an address from `Tensor.data_ptr()` or `Stream.cuda_stream` means the same
to either. They must be made for one major version of CUDA, though: each brings kernels and libraries of its own.
"""

from __future__ import annotations

from typing import Any

import torch


class NoCuPy(RuntimeError):
    """CuPy is missing, or is built for another CUDA than torch; the message has the remedy."""


def import_cupy() -> Any:
    """The module `cupy`.

    Raises:
        NoCuPy: torch is built without CUDA, CuPy is missing or cannot be loaded, or is made for another CUDA.
    """
    if torch.version.cuda is None:
        raise NoCuPy("this torch is built without CUDA; install torch for CUDA (pytorch.org has the command)")
    major = int(torch.version.cuda.partition(".")[0])
    extra = f"pip install 'minddp[cuda{major}]'"
    try:
        import cupy

        theirs = cupy.cuda.runtime.runtimeGetVersion() // 1000
    except ImportError as error:
        raise NoCuPy(f"CuPy is not installed, or cannot be loaded ({error}); {extra}") from error
    if theirs != major:
        raise NoCuPy(
            f"CuPy is made for CUDA {theirs} and torch for CUDA {major}; "
            f"pip uninstall cupy-cuda{theirs}x, then {extra}"
        )
    return cupy
