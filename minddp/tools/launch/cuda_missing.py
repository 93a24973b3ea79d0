"""What is said when a script dies because it asked for CUDA, or for NCCL, where there is none."""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

import torch

import minddp

#: What torch says then, in its own words; CPU builds lack the functions of torch._C that others have.
SIGNS = re.compile(
    r"not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|NCCL built in|no GPUs found|'_cuda_|'_nccl_"
    r"|requires CUDA support|dummy base class|accelerator device when none|not linked with support for cuda"
    r"|without ATen_cuda|on a CUDA device but|NVTX functions not|only work with single-device GPU"
    r"|--on-cpu has no replacement|at least one CUDA device|driver version is insufficient"
)
PLACE = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+).*\n(?:    (?P<source>.*)\n)?', re.MULTILINE)


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception hook: one line if CUDA is what is missing; under `--on-cpu` after the traceback."""
    where = place_of("".join(traceback.format_exception(kind, error, trace)))
    asserted = where["source"] or "" if where is not None and issubclass(kind, AssertionError) else ""
    is_on_cpu = "MINDDP_ON_CPU" in os.environ
    is_missing = is_on_cpu or not torch.cuda.is_available()
    if where is None or not is_missing or not (SIGNS.search(str(error)) or "cuda" in asserted):
        return sys.__excepthook__(kind, error, trace)
    remedy = "There is no GPU here; `minddp run --on-cpu` (or exec) runs the script on the CPU, as it is."
    if is_on_cpu:
        sys.__excepthook__(kind, error, trace)
        remedy = "--on-cpu has no replacement for this; tensors' .device is the CPU there."
    rank = f"Rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    lines = str(error).strip().splitlines() or [asserted]
    said = next(filter(SIGNS.search, lines), lines[-1]).rstrip(".")
    print(f"minddp: {rank}{where['file']}:{where['line']}: {said}. {remedy}", file=sys.stderr)
    return None


def place_of(text: str) -> re.Match[str] | None:
    """The last line of a printed traceback that is neither torch's nor minddp's."""
    own = tuple(str(Path(module.__file__ or "").parent) for module in (torch, minddp))
    places = [place for place in PLACE.finditer(text) if not place["file"].startswith((*own, "<"))]
    return places[-1] if places else None
