"""Where tensors are: each call that names a CUDA device makes, moves or loads on the CPU.

[Note: moves are copies]
Between a CPU and a GPU tensors are copied, and scripts rely on it: `{name: value.cpu()}` keeps weights that
training goes on to change, and a batch that was moved is changed in place without changing the data set. So
`.cpu()`, `.cuda()` and `.to("cuda")` copy. Exceptions are tensors that require gradients, which must remain leaves,
and `Module.to`, which keeps its parameters. A device read from a tensor, as in `x.to(y.device)`, moves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils.data import DataLoader

from minddp.compat.on_cpu.replacement import Function, Wrap, always, replace, with_arguments

CPU = torch.device("cpu")


def place(device: Any) -> Any:
    """The CPU for a CUDA device, as a string for a string; anything else as it is. A number is a CUDA device."""
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    if isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda":
        return "cpu" if isinstance(device, str) else CPU
    return device


def install() -> None:
    made = with_arguments(device=place, pin_memory=always(False))
    makers = _device_constructors()  # cached now, with the functions that a default device knows by identity
    for owner in (torch, torch.fft, torch.nested):
        names = [name for name, value in vars(owner).items() if callable(value) and value in makers]
        replace(owner, dict.fromkeys(names, made))
    like = "empty_like full_like ones_like rand_like randint_like randn_like zeros_like normal"
    replace(torch, {like: made, "as_tensor asarray": Wrap(_copying), "Generator": Generator})
    methods = {
        "new_empty new_empty_strided new_full new_ones new_tensor new_zeros": made,
        "to": Wrap(_copying),
        "cuda": lambda self, device=None, non_blocking=False, **kwargs: self.to("cuda", **kwargs),
        "cpu": Wrap(lambda cpu: lambda *args, **kwargs: cpu(*args, **kwargs).clone()),
        "pin_memory": lambda self, device=None: self.clone(),
        "record_stream": always(None),
        "type": Wrap(lambda type: lambda self, *names, **kwargs: type(self, *map(_of_cpu, names), **kwargs)),
    }
    replace(torch.Tensor, methods)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        replace(storage, {"cuda": lambda self, *args, **kwargs: self})
    replace(
        nn.Module,
        {
            "to": with_arguments(args=lambda args: map(place, args), device=place),
            "cuda": lambda self, device=None: self.to(CPU),
        },
    )
    replace(DeviceContext, {"__init__": with_arguments(device=place)})  # of `with torch.device("cuda")`
    replace(DataLoader, {"__init__": made})
    torch.serialization.register_package(15, always(None), _restore)  # between torch's for cpu and for cuda


def _of_cpu(dtype: Any) -> Any:
    """Without "cuda", if it is the name of a type of tensors."""
    return dtype.replace(".cuda", "") if isinstance(dtype, str) else dtype


def _restore(storage: Any, location: str) -> Any:
    """For torch.load: tensors that were saved on a GPU, or are mapped to one, stay where they were read."""
    return storage if location.startswith("cuda") else None


def _copying(original: Function) -> Function:
    """For `to`, and for what shares memory with its data. See [Note: moves are copies]."""

    def move(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = kwargs.get("device", args[0] if args else None)
        if isinstance(wanted, torch.Tensor):
            return original(data, *args, **kwargs)
        placed = {name: place(value) if name == "device" else value for name, value in kwargs.items()}
        moved = original(data, *map(place, args[:1]), *args[1:], **placed)
        is_copy = place(wanted) is not wanted or wanted == "cpu"
        return moved.clone() if is_copy and not moved.requires_grad else moved

    return move


class _GeneratorType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(metaclass=_GeneratorType):
    """torch.Generator, whose constructor places it on the CPU; what it returns is torch's own."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator(place(device))
