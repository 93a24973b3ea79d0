"""The contract of a communication hook. Torch's own hooks run unchanged.

A hook replaces the all-reduce of a bucket: `hook(state, bucket) -> torch.futures.Future[torch.Tensor]`. Python code
cannot construct torch's `dist.GradBucket`, but no hook checks the type: the `GradBucket` below has the same six
methods, and the hooks that torch ships (all-reduce, fp16, bf16, PowerSGD, ...) accept it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from minddp.core.bucket import Bucket, from_comm_buffer
from minddp.core.events import EventKind, EventStream
from minddp.core.packing import Scaling
from minddp.platform import streams

_AS_TEXT = ("dist.GradBucket", "GradBucket")  # annotations under `from __future__ import annotations`
_BF16_HOOKS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")  # torch, too, recognises them by name


class GradBucket:
    """A bucket as a hook sees it: flat buffer, per-parameter views, and its place in the launch order."""

    def __init__(self, bucket: Bucket, contents: torch.Tensor, *, is_last: bool):
        self._bucket = bucket
        self._buffer = contents
        self._is_last = is_last

    def index(self) -> int:
        """Position in the launch order, from 0."""
        return self._bucket.spec.index

    def buffer(self) -> torch.Tensor:
        """This rank's gradients, flat, not divided by the world size.

        As in torch, complex gradients are pairs of real numbers, and a sparse gradient is itself the buffer.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the tensor of `buffer()` and `gradients()` by a flat one with as many elements."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views into `buffer()` with the shapes of the parameters, always row-major, as in torch."""
        spec = self._bucket.spec
        if spec.sparse:
            return [self._buffer]
        flat = from_comm_buffer(self._buffer, spec)
        return [
            flat.narrow(0, slot.offset, slot.numel).view(param.size())
            for slot, param in zip(spec.slots, self._bucket.params, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the gradients, in the order of their offsets."""
        return list(self._bucket.params)

    def is_last(self) -> bool:
        """True for the last bucket of the backward."""
        return self._is_last


@dataclass(frozen=True)
class CommHook:
    """A registered hook with its state."""

    state: Any
    function: Callable[[Any, Any], Any]

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    @classmethod
    def checked(cls, state: Any, function: Callable[[Any, Any], Any]) -> CommHook:
        """A hook with the right signature, by torch's rules.

        Raises:
            TypeError: not callable, or bf16 compression on a machine where torch does not allow it.
            KeyError, ValueError: no parameter `bucket`, or annotations that contradict the contract.
        """
        if not callable(function):
            raise TypeError(f"Communication hook must be callable, but is {function!r}.")
        signature = inspect.signature(function)
        if "bucket" not in signature.parameters:
            raise KeyError(f"bucket: the communication hook takes (state, bucket), but has {signature}.")
        bucket_type = signature.parameters["bucket"].annotation
        if bucket_type not in (inspect.Parameter.empty, dist.GradBucket, GradBucket, *_AS_TEXT):
            raise ValueError(
                f"Communication hook: bucket annotation should be dist.GradBucket, but is {bucket_type!r}."
            )
        returns = signature.return_annotation
        allowed = torch.futures.Future[torch.Tensor]
        if returns not in (inspect.Signature.empty, allowed, "torch.futures.Future[torch.Tensor]"):
            raise ValueError(
                f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor], "
                f"but is {returns!r}."
            )
        hook = cls(state, function)
        if getattr(function, "__name__", "") in _BF16_HOOKS and not _bf16_reduces():
            raise TypeError(
                f"BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL, "
                f"and this machine has neither: use fp16_compress_hook instead of {hook.name}."
            )
        return hook

    def add_note(self, error: Exception, bucket: int) -> None:
        """Name the hook, and leave the type of the error, which scripts may check."""
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"Raised by the communication hook `{self.name}`, for bucket {bucket}.")


@dataclass(frozen=True)
class PendingHook:
    """A bucket that a communication hook reduces, as `core.reduction.PendingReduction`."""

    hook: CommHook
    future: torch._C.Future
    bucket: Bucket
    wait_for_future: Callable[[], object] | None = None  # reports a wait that takes too long

    def result(self) -> torch.Tensor:
        """Wait for the hook's tensor, and return it, contiguous, if it fits the bucket."""
        index, wanted = self.bucket.spec.index, self.bucket.comm_buffer.numel()
        if self.wait_for_future is not None:
            self.wait_for_future()
        try:
            value = self.future.wait()
        except Exception as error:
            self.hook.add_note(error, index)
            raise
        tensor = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != wanted:
            got = f"a tensor of {tensor.numel()} elements" if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise RuntimeError(
                f"The communication hook `{self.hook.name}` must give a tensor of {wanted} elements for bucket "
                f"{index}, but gave {got}."
            )
        return tensor if self.bucket.spec.sparse else tensor.resolve_neg().contiguous()

    def when_complete(self, callback: Callable[[], object]) -> None:
        self.future.add_done_callback(lambda _future: callback())


class HookStrategy:
    """Reduces buckets by a communication hook, as `core.reduction.ReduceStrategy`. As in torch, nothing is scaled.

    `watch_future(tensor, future)`, if given, returns a function that waits for the future of a hook and reports a
    wait that takes too long.
    """

    def __init__(self, hook: CommHook, events: EventStream, watch_future: Callable[..., Any] | None):
        self.hook = hook
        self._events = events
        self._watch_future = watch_future

    def begin_pass(self) -> Scaling:
        return Scaling()

    def launch(self, bucket: Bucket, contents: torch.Tensor, *, is_last: bool) -> PendingHook:
        hook, index = self.hook, bucket.spec.index
        try:
            future = hook.function(hook.state, GradBucket(bucket, contents, is_last=is_last))
        except Exception as error:
            hook.add_note(error, index)
            raise
        if not isinstance(future, torch._C.Future):
            raise RuntimeError(
                f"The communication hook's callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__} from `{hook.name}`. The future has to hold the bucket's new tensor."
            )
        wait = self._watch_future(bucket.comm_buffer, future) if self._watch_future is not None else None
        self._events.emit(EventKind.COMM_HOOK_RETURNED, index)
        reduction = PendingHook(hook, future, bucket, wait)
        # Hazard: PowerSGD starts two more collectives, and waits for them, in the callbacks of its futures. On gloo
        # these callbacks run in the two threads that also carry collectives. With two buckets in flight both
        # threads may wait, and the job hangs; or ranks start the further collectives in different orders. So on the
        # CPU only one of its buckets is in flight at a time, at the price of the overlap with backward.
        if bucket.comm_buffer.device.type == "cpu" and _is_power_sgd(hook.state):
            reduction.result()
        return reduction


def _is_power_sgd(state: Any) -> bool:
    """Also true of torch's wrappers around PowerSGD, which pass its state on."""
    power_sgd = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    return power_sgd is not None and isinstance(state, power_sgd.PowerSGDState)


def _bf16_reduces() -> bool:
    if (torch.version.cuda or torch.version.hip) and (nccl := streams.nccl_version()) is not None:
        return nccl >= (2, 10)
    return bool(getattr(dist, "is_xccl_available", lambda: False)() and streams.num_devices("xpu"))
