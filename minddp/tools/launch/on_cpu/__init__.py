"""`--on-cpu`: a script that asks for CUDA and NCCL runs, unmodified, on CPU tensors and gloo.

`torch.device("cuda")` stays what it is, because scripts branch on `device.type`; it is translated where it is used.
Tensors do not pretend: their `.device` is the CPU and `.is_cuda` is false, as torch's own code reads both.

[Note: functions are replaced]
A `TorchFunctionMode` would see the device of each call, too. But a mode is one per thread and off while it handles
a call, so everything that `loss.backward()` runs, checkpoints and hooks among it, would escape it; and each
attribute of each tensor costs a call. Functions are replaced in all threads, and other operations stay as they are.
But torch.jit knows functions by identity: `replace` registers the new ones there.
"""

from __future__ import annotations

import torch

from minddp.tools.launch.on_cpu import calls, cuda
from minddp.tools.launch.on_cpu.replacement import replace, show_warnings_at_the_caller


def install() -> None:
    """Replace, in this process and for as long as it lives. What has no replacement raises."""
    if torch.cuda._lazy_init is not _raise_unknown:
        calls.install_devices()
        calls.install_training()
        cuda.install()
        show_warnings_at_the_caller()
        replace(torch.cuda, {"_lazy_init": _raise_unknown})


def _raise_unknown() -> None:
    raise RuntimeError("This call needs CUDA itself, and --on-cpu has no replacement for it: leave it out.")
