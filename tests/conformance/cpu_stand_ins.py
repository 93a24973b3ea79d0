"""What rewritten tests call instead of CUDA: work on the CPU is synchronous, so streams and events do nothing.

`cpu_rewrite` puts these names into test modules.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch
from torch import nn

_ACCELERATORS = ("cuda", "xpu")


def _is_accelerator(device: Any) -> bool:
    """True if `device` names one: "cuda:1", torch.device("cuda"), or an index. A bool is no index."""
    if isinstance(device, torch.device):
        return device.type in _ACCELERATORS
    if isinstance(device, str):
        return device.startswith(_ACCELERATORS)
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(device: Any) -> Any:
    """The CPU for an accelerator; anything else as it is."""
    return torch.device("cpu") if _is_accelerator(device) else device


def device(*args: Any, **kwargs: Any) -> torch.device:
    """For `torch.device(...)`."""
    named = args[0] if args else kwargs.get("type")
    return torch.device("cpu") if _is_accelerator(named) else torch.device(*args, **kwargs)


def cuda_method(subject: Any, *args: Any, **kwargs: Any) -> Any:
    """For `subject.cuda(...)`. As on a GPU, a tensor is copied and a module is changed in place."""
    if isinstance(subject, nn.Module):
        return subject
    if isinstance(subject, torch.Tensor):
        return subject.to("cpu", copy=True)
    return subject.cuda(*args, **kwargs)


def to_method(subject: Any, *args: Any, **kwargs: Any) -> Any:
    """For `subject.to(...)`, likewise."""
    target = args[0] if args else kwargs.get("device")
    if args:
        args = (on_cpu(args[0]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = on_cpu(kwargs["device"])
    if _is_accelerator(target) and isinstance(subject, torch.Tensor):
        kwargs.setdefault("copy", True)
    return subject.to(*args, **kwargs)


class Stream:
    """For streams of any kind, also as a context manager."""

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def wait_stream(self, _stream: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exception: Any) -> None:
        pass


class Event:
    """For events: over as soon as recorded."""

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def record(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 1.0


class _DeviceModule:
    """For `torch.cuda` and `torch.accelerator`: what is not named here is taken from the real one."""

    Stream = Stream
    Event = Event
    device_count = staticmethod(lambda: 8)  # enough for any test
    is_available = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    current_accelerator = staticmethod(lambda *_args, **_kwargs: None)

    def __init__(self, real: ModuleType):
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    set_device = set_device_index = synchronize = empty_cache = _sleep = manual_seed = manual_seed_all = _nothing

    def _no_context(self, *_args: Any, **_kwargs: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    device = stream = _no_context

    def current_stream(self, *_args: Any, **_kwargs: Any) -> Any:
        return Stream()

    default_stream = current_stream


cuda_module = _DeviceModule(torch.cuda)
accelerator_module = _DeviceModule(torch.accelerator)


def stand_in_for_streams() -> None:
    """In torch itself: its own DDP uses streams unconditionally with mixed precision and fused optimizers."""
    torch.Stream, torch.Event = Stream, Event  # type: ignore[assignment,misc]
    torch.accelerator.current_stream = lambda *_args: Stream()  # type: ignore[assignment,return-value]
    torch.accelerator.set_stream = lambda *_args: None


def one_device_per_rank() -> None:
    """As many "devices" as ranks, where PyTorch's test helpers share out GPUs."""
    from torch.testing._internal import common_distributed

    common_distributed.init_multigpu_helper = lambda world_size, backend: {
        rank: [rank] for rank in range(int(world_size))
    }
