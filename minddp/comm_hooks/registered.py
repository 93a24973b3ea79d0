"""Communication hooks: what one is given and what it must give back. Torch's own plug in unchanged.

A hook replaces the all-reduce of a bucket: `hook(state, bucket) -> torch.futures.Future[torch.Tensor]`. Torch's
`dist.GradBucket` cannot be made from Python, but no hook asks for its type: `GradBucket` here has the same six
methods, and the hooks that torch ships (all-reduce, fp16, bf16, PowerSGD, ...) accept it.

[Note: hooks that send from callbacks]
PowerSGD makes two more collectives when its first is done, and waits for them, in the callbacks of its futures. On
gloo these run in the two threads that also carry collectives: with two buckets under way both threads wait, and
nothing is left to carry what they wait for. Where a thread is left, buckets send in an order that is chance, and
another one on each rank. So on the CPU a bucket of PowerSGD is waited for before backward goes on: one bucket is
under way at a time, and every rank sends in one order. That gives up the overlap with backward.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from minddp.core.bucket import GradientBucket, from_wire
from minddp.core.events import EventKind, EventStream
from minddp.core.packing import Scaling
from minddp.platform import streams

_AS_TEXT = ("dist.GradBucket", "GradBucket")  # annotations under `from __future__ import annotations`
_BF16_HOOKS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")  # torch goes by the names, too


class GradBucket:
    """One bucket as a hook sees it: flat buffer, per-parameter views, and its place in the launch order."""

    def __init__(self, bucket: GradientBucket, *, is_last: bool, instead: torch.Tensor | None = None):
        self._bucket = bucket
        self._buffer = bucket.wire if instead is None else instead
        self._is_last = is_last

    def index(self) -> int:
        """Position in the launch order, from 0."""
        return self._bucket.spec.index

    def buffer(self) -> torch.Tensor:
        """This rank's gradients, flat, not divided by the world size.

        Complex gradients are pairs of real numbers, as in torch. A sparse one is itself the buffer.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let `buffer()` and `gradients()` show another tensor, flat and of as many elements."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views into `buffer()` in the shapes of the parameters, row-major whatever their strides (as torch)."""
        spec = self._bucket.spec
        if spec.sparse:
            return [self._buffer]
        flat = from_wire(self._buffer, spec)
        return [
            flat.narrow(0, slot.offset, slot.numel).view(param.size())
            for slot, param in zip(spec.slots, self._bucket.params, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients these are, in the order of their offsets."""
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

    @property
    def sends_from_callbacks(self) -> bool:
        """See [Note: hooks that send from callbacks]. A wrapper around torch's hook passes its state on."""
        power_sgd = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
        return power_sgd is not None and isinstance(self.state, power_sgd.PowerSGDState)

    @classmethod
    def checked(cls, state: Any, function: Callable[[Any, Any], Any]) -> CommHook:
        """A hook whose signature is right, by the rules torch applies.

        Raises:
            TypeError: not callable, or bf16 compression on a machine where torch does not allow it.
            ValueError: annotations that contradict the contract.
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

    def launch(self, bucket: GradBucket) -> torch._C.Future:
        try:
            future = self.function(self.state, bucket)
        except Exception as error:
            self._blamed_for(error, bucket.index())
            raise
        if not isinstance(future, torch._C.Future):
            raise RuntimeError(
                f"The communication hook's callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__} from `{self.name}`. The future has to hold the bucket's new tensor."
            )
        return future

    def result_of(self, future: torch._C.Future, bucket: GradientBucket) -> torch.Tensor:
        """Wait for the hook's tensor, contiguous, and check that it fits the bucket."""
        try:
            value = future.wait()
        except Exception as error:
            self._blamed_for(error, bucket.spec.index)
            raise
        tensor = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != bucket.wire.numel():
            got = f"a tensor of {tensor.numel()} elements" if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise RuntimeError(
                f"The communication hook `{self.name}` must give a tensor of {bucket.wire.numel()} elements for "
                f"bucket {bucket.spec.index}, but gave {got}."
            )
        return tensor if bucket.spec.sparse else tensor.resolve_neg().contiguous()

    def _blamed_for(self, error: Exception, bucket: int) -> None:
        """Let the error, whose type scripts may go by, say where it comes from."""
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"Raised by the communication hook `{self.name}`, for bucket {bucket}.")


#: Watches a future that is to bring a tensor, so that waiting for it too long is noticed.
WatchFuture = Callable[[torch.Tensor, torch._C.Future], Callable[[], object]]


@dataclass(frozen=True)
class HookedReduction:
    """A bucket that a communication hook reduces, as `core.reduction.Reduction`. `wait_for_future` watches."""

    hook: CommHook
    future: torch._C.Future
    bucket: GradientBucket
    wait_for_future: Callable[[], object] | None = None

    def result(self) -> torch.Tensor:
        if self.wait_for_future is not None:
            self.wait_for_future()
        return self.hook.result_of(self.future, self.bucket)

    def when_complete(self, callback: Callable[[], object]) -> None:
        self.future.add_done_callback(lambda _future: callback())


class HookReducing:
    """Lets a communication hook reduce the buckets, as `core.reduction.Reducing`. Nothing is scaled."""

    def __init__(self, hook: CommHook, events: EventStream, watch_future: WatchFuture | None):
        self.hook = hook
        self._events = events
        self._watch_future = watch_future

    def open(self) -> Scaling:
        return Scaling(restores_unused=False)  # as torch

    def launch(
        self, bucket: GradientBucket, contents: torch.Tensor | None = None, *, is_last: bool
    ) -> HookedReduction:
        future = self.hook.launch(GradBucket(bucket, is_last=is_last, instead=contents))
        wait = self._watch_future(bucket.wire, future) if self._watch_future is not None else None
        self._events.emit(EventKind.COMM_HOOK_RETURNED, bucket.spec.index)
        reduction = HookedReduction(self.hook, future, bucket, wait)
        if self.hook.sends_from_callbacks and bucket.wire.device.type == "cpu":
            reduction.result()
        return reduction


def _bf16_reduces() -> bool:
    if (torch.version.cuda or torch.version.hip) and (nccl := streams.nccl_version()) is not None:
        return nccl >= (2, 10)
    return bool(getattr(dist, "is_xccl_available", lambda: False)() and streams.num_devices("xpu"))
