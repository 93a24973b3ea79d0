"""`--on-cpu`: a script that asks for CUDA and NCCL runs, unmodified, on CPU tensors and gloo.

`torch.device("cuda")` stays as it is, because scripts branch on `device.type`. It means the CPU where it is used.
Tensors report the CPU as `.device`, and `.is_cuda` is false, since torch's own code reads both.

Functions of torch are replaced, in all threads. A `TorchFunctionMode` exists per thread and is off while it handles
a call, so it would miss everything that `loss.backward()` runs, such as checkpoints and hooks.
"""

from __future__ import annotations

from minddp.tools.launch.on_cpu import calls, cuda


def install() -> None:
    """Replace functions of torch for the rest of this process. Other calls that need CUDA raise."""
    calls.install_devices()
    calls.install_training()
    cuda.install()
