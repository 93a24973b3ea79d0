"""The error message for scripts that need CUDA or NCCL on a machine without it."""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

import torch

import minddp

#: Torch's messages in this case. CPU builds also lack some functions of torch._C.
SIGNS = re.compile(
    r"not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|NCCL built in|no GPUs found|'_cuda_|'_nccl_"
    r"|requires CUDA support|dummy base class|accelerator device when none|not linked with support for cuda"
    r"|without ATen_cuda|on a CUDA device but|NVTX functions not|only work with single-device GPU"
    r"|--on-cpu has no replacement|at least one CUDA device|driver version is insufficient"
)
PLACE = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+).*\n(?:    (?P<source>.*)\n)?', re.MULTILINE)


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exception hook: if CUDA is missing, print one line instead of the traceback; under `--on-cpu`, after it."""
    where = place_of("".join(traceback.format_exception(kind, error, trace)))
    asserted = where["source"] or "" if where is not None and issubclass(kind, AssertionError) else ""
    is_on_cpu = "MINDDP_ON_CPU" in os.environ
    has_cuda = torch.cuda.is_available() and not is_on_cpu
    if where is None or has_cuda or not (SIGNS.search(str(error)) or "cuda" in asserted):
        return sys.__excepthook__(kind, error, trace)
    remedy = "There is no GPU here; `minddp run --on-cpu` (or exec) runs the script on the CPU, as it is."
    if is_on_cpu:
        sys.__excepthook__(kind, error, trace)
        remedy = "--on-cpu has no replacement for this; tensors' .device is the CPU there."
    rank = f"Rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    lines = str(error).strip().splitlines() or [asserted]
    reason = next(filter(SIGNS.search, lines), lines[-1]).rstrip(".")
    print(f"minddp: {rank}{where['file']}:{where['line']}: {reason}. {remedy}", file=sys.stderr)
    return None


def place_of(text: str) -> re.Match[str] | None:
    """The innermost place of a printed traceback that is outside torch and minddp."""
    own = tuple(str(Path(module.__file__ or "").parent) for module in (torch, minddp))
    places = [place for place in PLACE.finditer(text) if not place["file"].startswith((*own, "<"))]
    return places[-1] if places else None
