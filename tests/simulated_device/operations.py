"""What each operation of torch reads, writes, allocates and waits for.

A dispatch mode sees what runs, in backward too, with a schema that says which arguments are written and which
results are only views. What runs nothing on the CPU is seen where Python asks for it: `.tolist()`, or `.to(device)`
of a tensor that is there already.

[Note: host memory]
All tensors are on the CPU, so this is a convention: the string "cpu", or no device at all, in a call of
`torch.tensor` means the host. `torch.device("cpu")`, as `tensor.device` has it, means the simulated device. What is
computed of tensors on the host alone is on the host.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.cuda._sanitizer import zip_arguments
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.simulated_device.device import SimulatedDevice

READS_SHAPES = re.compile(r"aten::(new_.*|.*_like|set_|resize_.*|is_.*)$")
READ_BY_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

Collective = Callable[[str, Sequence[torch.Tensor], Callable[[], Any]], Any]


def on_device(tensors: Any) -> list[torch.Tensor]:
    """The tensors within that have memory of their own."""
    leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_meta and leaf.numel()]


class Operations(TorchDispatchMode):
    """Notes what runs. `collective` is given those of process groups."""

    def __init__(self, device: SimulatedDevice, collective: Collective):
        super().__init__()
        self._device = device
        self._collective = collective

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, kwargs = self._device, kwargs or {}
        if func.namespace == "c10d":
            return self._collective(str(func), on_device(args), lambda: func(*args, **kwargs))
        reads, writes = reads_and_writes(func._schema, args, kwargs)
        kinds = {device.memory_of(tensor).kind for tensor in (*reads, *writes)}
        results = func(*args, **kwargs)
        for tensor in on_device(results):
            if tensor.untyped_storage()._cdata not in device.memory:
                device.memory_of(tensor).kind = "host" if kinds and "device" not in kinds else "device"
                writes.append(tensor)
        if reads or writes:
            device.run(str(func), device.current, map(device.place_of, reads), map(device.place_of, writes))
        if "device" in kinds and any(tag in func.tags for tag in READ_BY_HOST):
            device.host_waits(str(func))
        return results


def reads_and_writes(schema: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operation reads and those that it writes; neither where it makes a view of them."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for argument, value in zip_arguments(schema, args, kwargs):
        if argument.alias_info is None:
            reads += on_device(value)
        elif argument.alias_info.is_write:
            writes += on_device(value)
    return ([], []) if READS_SHAPES.match(schema.name) else (reads, writes)


def copies(device: SimulatedDevice) -> list[tuple[Any, str, Any]]:
    """What to put in the place of methods that copy between host and device. See [Note: host memory]."""
    make, move = torch.tensor, torch.Tensor.to

    def make_tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        memory = device.memory_of(made)
        memory.accesses.clear()
        memory.kind = "pinned" if pin_memory else "host"
        return to(made, kwargs["device"]) if isinstance(kwargs.get("device"), torch.device) else made

    def to(source: torch.Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        kind, target = device.memory_of(source).kind, kwargs.get("device", args[0] if args else None)
        moves = isinstance(target, torch.device) and kind != "device"
        if (moves or isinstance(target, str)) and not (non_blocking and kind != "host"):
            device.host_waits("a copy between host and device")
        fetches = target == "cpu" and kind == "device" and non_blocking  # into pinned memory
        if not (moves or fetches) or not source.numel():
            return move(source, *args, **kwargs)
        with _disable_current_modes():
            moved = move(source, *args, **kwargs).clone()
        device.run("a copy", device.current, [device.place_of(source)], [device.place_of(moved)])
        device.memory_of(moved).kind = "pinned" if fetches else "device"
        return moved

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any) -> Any:
            here = threading.current_thread() is threading.main_thread()
            if here and tensor.numel() and device.memory_of(tensor).kind == "device":
                device.run(method.__name__, device.current, [device.place_of(tensor)], [])
                device.host_waits(method.__name__)
            return method(tensor, *args)

        return read

    readers = [(torch.Tensor, name, reading(getattr(torch.Tensor, name))) for name in ("cpu", "tolist", "numpy")]
    return [(torch, "tensor", make_tensor), (torch.Tensor, "to", to), *readers]
