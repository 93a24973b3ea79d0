"""Sources of events: minddp's wrapper, which reports them, and torch's, which is watched from outside.

**Limits with torch's wrapper.** Let it take two steps before the recording: torch rebuilds its buckets after the
first, without a sign. Visible from outside are forward, each gradient (a hook on each parameter), each bucket's
launch and completion (a communication hook that only times), and the end of backward. The waits for single
buckets, packing and copying back happen in C++ between two visible moments. So `reading.py` assumes that after
backward each bucket is waited for, in order, until it completes.

**The hook that stays.** A communication hook can be registered once and never removed. When the recording ends it
stays and reduces as before, without an event. It multiplies by 1/world_size before it sums, as torch does without
a hook; but with `gradient_as_bucket_view` or `batched_grad_copy` torch divides, which at world sizes that are no
power of two may differ in the last bit. A module that already has a communication hook cannot be recorded.
"""

from __future__ import annotations

import atexit
import time
import weakref
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minddp.core.autograd import call_at_end_of_backward, call_when_gradient_enters
from minddp.core.events import EventKind, EventStream
from minddp.core.plan import BucketPlan, ParamSpec, plan_from_groups
from minddp.ddp import DistributedDataParallel

CALLBACKS_S = 2.0  # how long to wait for the end of callbacks


class Source(Protocol):
    """A data-parallel wrapper, as the recorder sees it.

    `topic` is equal on all ranks that are about to take the same step of the same wrapper, and differs otherwise.
    `has_plan`: the wrapper's arguments can change its buckets. `steps_taken` counts synchronised backwards.
    `adds_after_s`: see `Transport`.
    """

    wrapper: str
    has_plan: bool
    title: str
    rank: int
    world_size: int
    device: torch.device
    backend: str
    adds_after_s: float
    events: EventStream

    @property
    def store(self) -> dist.Store | None: ...

    @property
    def topic(self) -> str: ...

    @property
    def steps_taken(self) -> int: ...

    def plan(self) -> BucketPlan:
        """The gradients of each bucket at present."""


class MinddpSource:
    """minddp's own wrapper: its reducer reports all events."""

    wrapper = "minddp"
    has_plan = True

    def __init__(self, ddp: DistributedDataParallel):
        self._reducer = ddp._reducer
        transport = self._reducer.transport
        self.title = type(ddp.module).__name__
        self.rank, self.world_size, self.store = transport.rank, transport.world_size, transport.store
        self.device = ddp.device
        self.backend: str = dist.get_backend(ddp.process_group)
        self.adds_after_s = transport.adds_after_s
        self.events = self._reducer.events

    @property
    def topic(self) -> str:
        return f"minddp/tools/xray/{self._reducer.unfinished.serial}/{self.steps_taken}"

    @property
    def steps_taken(self) -> int:
        return self._reducer.num_passes

    def plan(self) -> BucketPlan:
        return self._reducer.store.plan


class NativeSource:
    """torch's wrapper, watched from outside. See the module's docstring."""

    wrapper = "torch DDP"
    has_plan = True
    adds_after_s = 0.0

    def __init__(self, ddp: TorchDDP):
        if getattr(ddp, "_comm_hooks", None):
            raise ValueError(
                "This module has a communication hook already, and torch's wrapper takes only one, which the "
                "recording needs. Record it with minddp's wrapper instead."
            )
        group: Any = ddp.process_group
        named = [(name, param) for name, param in ddp.module.named_parameters() if param.requires_grad]
        self._ddp = ddp
        self.events = EventStream()
        self._emit = self.events.emit
        self._params = [ParamSpec(name, p.numel(), p.dtype, p.device) for name, p in named]
        self._index_of = {param: index for index, (_, param) in enumerate(named)}
        self._buckets: dict[int, tuple[int, ...]] = {}
        self._in_backward = False
        self._callbacks: list[weakref.ref[Any]] = []  # that were alive when the last bucket left
        self.title = type(ddp.module).__name__
        self.rank, self.world_size = group.rank(), group.size()
        self.device = named[0][1].device
        self.backend: str = dist.get_backend(group)
        self.store: dist.Store | None = dist.distributed_c10d._world.pg_map.get(group, (None, None))[1]
        self.steps_taken = 0
        ddp.register_forward_pre_hook(lambda *_: self._emit(EventKind.FORWARD_BEGIN))
        ddp.register_forward_hook(self._on_forward_end)
        for param, index in self._index_of.items():
            param.register_post_accumulate_grad_hook(partial(self._on_gradient, index))
        atexit.register(self._await_callbacks)
        ddp.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))  # torch reads annotations

    @classmethod
    def of(cls, ddp: TorchDDP) -> NativeSource:
        """The one source of this module: its hook can be registered only once."""
        if "_minddp_xray" not in vars(ddp):
            vars(ddp)["_minddp_xray"] = cls(ddp)
        return vars(ddp)["_minddp_xray"]

    @property
    def topic(self) -> str:
        return f"minddp/xray/torch/{self.title}/{self.steps_taken}"

    def plan(self) -> BucketPlan:
        """The buckets that the hook has seen; before the first backward only the parameters are known."""
        groups = [self._buckets[index] for index in sorted(self._buckets)]
        return plan_from_groups(self._params, groups, "as torch's wrapper has it")

    def _on_forward_end(self, _module: Any, _inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not self._ddp.require_backward_grad_sync:
            self._emit(EventKind.NO_SYNC)
        elif torch.is_grad_enabled():
            call_when_gradient_enters(output, self._begin_backward)
        self._emit(EventKind.FORWARD_END)

    def _begin_backward(self, *_: Any) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._emit(EventKind.BACKWARD_BEGIN)
            # Callbacks run in the order in which they are queued. Torch's wrapper queues its own, which waits and
            # copies back, when its last bucket leaves: ours runs before it, and queues one that runs after it.
            call_at_end_of_backward(self._on_gradients_complete)

    def _on_gradient(self, index: int, _param: torch.Tensor) -> None:
        if not self._ddp.require_backward_grad_sync:
            self._emit(EventKind.GRADIENT_KEPT, index)
            return
        self._begin_backward()
        self._emit(EventKind.PARAM_READY, index)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as torch does without a hook."""
        index = bucket.index()
        if index not in self._buckets or self.events.sink is not None:
            self._buckets[index] = tuple(self._index_of[param] for param in bucket.parameters())
        self._emit(EventKind.BUCKET_READY, index)
        tensor = bucket.buffer().mul_(1 / self.world_size)
        self._emit(EventKind.BUCKET_LAUNCHED, index)
        group: Any = self._ddp.process_group
        future = group.allreduce([tensor]).get_future()
        if self.events.sink is not None:
            future.add_done_callback(lambda _: self._emit(EventKind.BUCKET_COMPLETED, index))
        value = lambda done: done.value()[0]  # noqa: E731 (referred to below)
        self._callbacks = [*(alive for alive in self._callbacks if alive() is not None), weakref.ref(value)]
        return future.then(value)

    def _await_callbacks(self) -> None:
        """Wait until all callbacks are dropped, before the interpreter ends.

        A bucket's result passes through a callback in Python, on gloo's thread, which drops the callback some
        milliseconds later, when Python's lock is free. If the interpreter has begun to end by then, Python ends
        that thread within a destructor, and the process aborts ("terminate called without an active exception").
        """
        end_s = time.monotonic() + CALLBACKS_S
        while any(alive() is not None for alive in self._callbacks) and time.monotonic() < end_s:
            time.sleep(0.001)

    def _on_gradients_complete(self) -> None:
        self._emit(EventKind.GRADIENTS_COMPLETE)
        call_at_end_of_backward(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._in_backward = False
        self.steps_taken += 1
        self._emit(EventKind.BACKWARD_END)
