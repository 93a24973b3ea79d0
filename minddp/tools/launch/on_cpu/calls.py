"""Calls that name a CUDA device make, move and load on the CPU; also wrappers, autocast, kernels and compilers.

A move between a CPU and a GPU copies, and scripts rely on it: `{name: value.cpu()}` keeps weights while training
changes them, and a script changes a moved batch in place without changing the data set. So `.cpu()`, `.cuda()` and
`.to("cuda")` copy. Exceptions are tensors that require gradients, which must remain leaves, and `Module.to`, which
keeps its parameters. A device that was read from a tensor, as in `x.to(y.device)`, is the CPU and moves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils.data import DataLoader

from minddp.compat.surface import DistributedDataParallel
from minddp.tools.launch.on_cpu.replacement import Function, Wrap, always, replace, say_once, with_arguments

CPU = torch.device("cpu")
NOT_COMPILED = "torch.compile and CUDA graphs are skipped: modules and functions run as they are."


def place(device: Any) -> Any:
    """The CPU for a CUDA device, as a string for a string; anything else unchanged. A number is a CUDA device."""
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    if isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda":
        return "cpu" if isinstance(device, str) else CPU
    return device


def install_devices() -> None:
    """Replace calls that make, move or load tensors."""
    nothing, placed = always(None), with_arguments(device=place)
    made = with_arguments(device=place, pin_memory=always(False))
    makers = _device_constructors()  # cached, with the functions that a default device knows by identity
    names = [name for name, value in vars(torch).items() if callable(value) and value in makers]
    replace(torch, dict.fromkeys(names, made))
    like = "empty_like full_like ones_like rand_like randint_like randn_like zeros_like normal"
    replace(torch, {like: made, "as_tensor asarray": Wrap(_copying), "Generator": Generator})
    of_tensors = {
        "new_empty new_empty_strided new_full new_ones new_tensor new_zeros": made,
        "to": Wrap(_copying),
        "cuda": lambda self, device=None, non_blocking=False, **kwargs: self.to("cuda", **kwargs),
        "cpu": Wrap(lambda cpu: lambda *args, **kwargs: cpu(*args, **kwargs).clone()),
        "pin_memory": lambda self, device=None: self.clone(),
        "record_stream": nothing,
    }
    replace(torch.Tensor, of_tensors)
    replace(torch.UntypedStorage, {"cuda": lambda self, *args, **kwargs: self})
    of_modules = {
        "to": with_arguments(args=lambda args: map(place, args), device=place),
        "cuda": lambda self, device=None: self.to(CPU),
        "compile": lambda self, *args, **kwargs: say_once(NOT_COMPILED),
    }
    replace(nn.Module, of_modules)
    replace(DeviceContext, {"__init__": placed})  # of `with torch.device("cuda")`
    replace(torch.amp.GradScaler, {"__init__": placed})
    replace(DataLoader, {"__init__": made})
    # For torch.load, between torch's for cpu and for cuda: a GPU's tensors stay where they were read.
    torch.serialization.register_package(
        15, nothing, lambda data, place: data if place.startswith("cuda") else None
    )


def install_training() -> None:
    """Replace calls of NCCL, wrappers, autocast, choices of kernels, and compilers."""
    nothing = always(None)
    collectives = {
        "init_process_group new_group": with_arguments(
            backend=lambda backend: "gloo" if "nccl" in str(backend or "nccl").lower() else backend,
            device_id=nothing,
            pg_options=lambda options: None if "NCCL" in type(options).__qualname__ else options,
        ),
        "barrier": with_arguments(device_ids=nothing),
        "is_nccl_available": always(True),
        "init_device_mesh": with_arguments(device_type=place),
    }
    replace(dist, collectives)
    for wrapper in (DistributedDataParallel, TorchDDP):
        replace(wrapper, {"__init__": with_arguments(device_ids=nothing, output_device=nothing)})
    replace(nn.SyncBatchNorm, {"convert_sync_batchnorm": _not_converted})
    autocast = "is_autocast_enabled set_autocast_enabled get_autocast_dtype set_autocast_dtype"
    replace(torch, {autocast: Wrap(_state_of_cpu), "compile": _not_compiled})
    replace(torch.autocast, {"__init__": Wrap(_autocast_on_cpu)})
    for kernel in ("flash", "math", "mem_efficient", "cudnn"):  # a GPU's: without flash and math the CPU has none
        replace(torch._C, {f"_set_sdp_use_{kernel}": nothing})


def _copying(original: Function) -> Function:
    """For `to`, `as_tensor` and `asarray`. Moves copy; see the module's docstring."""

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
    """torch.Generator, always on the CPU. The objects are torch's own."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator(place(device))


def _not_converted(module: nn.Module, process_group: Any = None) -> nn.Module:
    say_once("SyncBatchNorm is BatchNorm: each rank normalizes by its own batch.")
    return module


def _autocast_on_cpu(original: Function) -> Function:
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if place(device_type) is not device_type and (dtype or torch.float16) == torch.float16:
            dtype = torch.bfloat16  # in float16 the CPU has no LSTM, and convolutions take 100 times as long
            if kwargs.get("enabled", args[0] if args else True):
                say_once("autocast computes in bfloat16 in the place of float16.")
        original(self, place(device_type), dtype, *args, **kwargs)

    return init


def _state_of_cpu(original: Function) -> Function:
    """For `f("cuda", ...)`, and `f(...)` without a device, which means CUDA."""

    def function(*args: Any) -> Any:
        return original(place(args[0]), *args[1:]) if args and isinstance(args[0], str) else original("cpu", *args)

    return function


def _not_compiled(model: Any = None, **kwargs: Any) -> Any:
    """torch.compile, also as a decorator. A module is wrapped, because the keys of its state dict show it."""
    if model is None:
        return _not_compiled
    say_once(NOT_COMPILED)
    return torch._dynamo.disable(model) if isinstance(model, nn.Module) else model
