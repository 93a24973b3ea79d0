"""What else training asks of a GPU: NCCL and wrappers' devices, autocast, choices among kernels, compilers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from minddp.compat.on_cpu.devices import place
from minddp.compat.on_cpu.replacement import Function, Wrap, always, replace, say_once, with_arguments
from minddp.compat.surface import DistributedDataParallel


def install() -> None:
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
    replace(TorchDDP, {"_passing_sync_batchnorm_handle": nothing})
    replace(nn.SyncBatchNorm, {"convert_sync_batchnorm": _not_converted, "forward": _not_synchronised})
    nn.SyncBatchNorm.runs_on_cpu = True  # type: ignore[attr-defined]  # for minddp; torch's check is replaced above

    autocast = "is_autocast_enabled set_autocast_enabled get_autocast_dtype set_autocast_dtype"
    replace(torch, {autocast: Wrap(_state_of_cpu), "compile": _not_compiled})
    replace(torch.autocast, {"__init__": Wrap(_autocast_on_cpu)})
    replace(torch.amp.GradScaler, {"__init__": with_arguments(device=place)})
    for kernel in ("flash", "math", "mem_efficient", "cudnn"):  # a GPU's: without flash and math the CPU has none
        replace(torch._C, {f"_set_sdp_use_{kernel}": nothing})
    replace(torch.backends.cuda, {"is_built": always(True)})
    of_cpu = with_arguments(use_cuda=always(False), use_device=lambda device: None if device == "cuda" else device)
    replace(torch.autograd.profiler.profile, {"__init__": of_cpu})
    replace(nn.Module, {"compile": lambda self, *args, **kwargs: _say_not_compiled()})
    replace(torch.cuda, {"make_graphed_callables": lambda callables, *args, **kwargs: _not_compiled(callables)})


def _not_converted(module: nn.Module, process_group: Any = None) -> nn.Module:
    say_once("SyncBatchNorm is BatchNorm: each rank normalises by its own batch.")
    return module


def _not_synchronised(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
    _not_converted(self)
    return _BatchNorm.forward(self, input)


def _autocast_on_cpu(original: Function) -> Function:
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if place(device_type) is not device_type and (dtype or torch.float16) == torch.float16:
            dtype = torch.bfloat16  # float16 lacks kernels (LSTM) or is slow: a convolution takes 100 times as long
            if kwargs.get("enabled", args[0] if args else True):
                say_once("autocast computes in bfloat16 in the place of float16.")
        original(self, place(device_type), dtype, *args, **kwargs)

    return init


def _state_of_cpu(original: Function) -> Function:
    """`f("cuda", ...)`, and `f(...)` without a device, which means CUDA."""

    def function(*args: Any) -> Any:
        return original(place(args[0]), *args[1:]) if args and isinstance(args[0], str) else original("cpu", *args)

    return function


def _not_compiled(model: Any = None, **kwargs: Any) -> Any:
    """torch.compile, as a function and as a decorator. A module is wrapped, because keys of its state say so."""
    if model is None:
        return _not_compiled
    _say_not_compiled()
    return torch._dynamo.disable(model) if isinstance(model, nn.Module) else model


def _say_not_compiled() -> None:
    say_once("torch.compile and CUDA graphs are left out; modules and functions run as they are.")
