"""The kernel as NVRTC translates it with CuPy's options, where there is an NVRTC: no GPU is needed for that."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minddp.fused_pack.kernel import BODY, CONVERSIONS, NAMES_IN_C, options

#: What CuPy 13 and 14 add behind a kernel's own options. See [Note: denormal numbers].
CUPYS_OPTIONS = ("-std=c++17", "-ftz=true", "-arch=compute_90", "--device-as-default-execution-space")


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    """The library, from beside torch or from a toolkit."""
    beside_torch = (str(path) for place in sys.path for path in Path(place).glob("nvidia/*/lib/libnvrtc.so.1?"))
    for name in (*beside_torch, "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    pytest.skip("needs NVRTC, which comes with a torch for CUDA")


def translated(nvrtc: Any, definitions: tuple[str, ...]) -> str:
    """The kernel with these definitions, in PTX."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = (CONVERSIONS + BODY).encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None) == 0
    flags = [flag.encode() for flag in (*definitions, *CUPYS_OPTIONS)]
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    ask_size, ask = (
        (nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        if failed
        else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    )
    ask_size(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    ask(program, text)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert not failed, text.value.decode()
    return text.value.decode()


def kinds() -> Iterator[tuple[torch.dtype, torch.dtype, bool]]:
    yield from itertools.product(NAMES_IN_C, NAMES_IN_C, (True, False))


def test_it_compiles_as_cupy_compiles_it_and_flushes_no_denormal_number(nvrtc: Any) -> None:
    for grad, bucket, gathers in kinds():
        ptx = translated(nvrtc, options(grad, bucket, gathers=gathers))
        assert ".entry move_chunks" in ptx
        flushing = sorted({line.split()[0] for line in ptx.splitlines() if ".ftz" in line})
        assert not flushing, f"{grad} to {bucket}, gathers={gathers}"


def test_sixteen_bytes_are_moved_at_once(nvrtc: Any) -> None:
    """Of the wider type; a narrower one on the other side takes as many elements."""
    for grad, bucket, gathers in kinds():
        ptx = translated(nvrtc, options(grad, bucket, gathers=gathers))
        vectors = [line.split()[0] for line in ptx.splitlines() if line.split()[:1] and ".v" in line.split()[0]]
        assert any(name.startswith("ld.global") for name in vectors), (grad, bucket, gathers)
        assert any(name.startswith("st.global") for name in vectors), (grad, bucket, gathers)
