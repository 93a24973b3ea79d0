"""The remedy for scripts that need CUDA or NCCL on a machine without it."""

from __future__ import annotations

import os
import re
import sys
import traceback
from types import TracebackType

import torch


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exception hook: after the traceback, a line with the remedy if the error is about CUDA and there is none."""
    sys.__excepthook__(kind, error, trace)
    innermost = "".join(frame.line or "" for frame in traceback.extract_tb(trace)[-1:])
    is_on_cpu = "MINDDP_ON_CPU" in os.environ
    if (torch.cuda.is_available() and not is_on_cpu) or not re.search(
        "cuda|nccl|nvidia", f"{error} {innermost}", re.I
    ):
        return
    remedy = "There is no GPU here; `minddp run --on-cpu` (or exec) runs the script on the CPU, as it is."
    if is_on_cpu:
        remedy = "Under --on-cpu, tensors' .device is the CPU, and some calls of CUDA have no replacement."
    print(f"minddp: {remedy}", file=sys.stderr)
