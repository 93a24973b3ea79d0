"""All use of the autograd engine.

- When has this parameter's gradient been accumulated?  `GradientHooks`
- Which parameters will this backward reach?            `will_be_reached`
- When does this backward end?                          `call_at_end_of_backward`
- Which backward is running, and inside another one?    `current_backward`, `inside_another_backward`

[Note: the hook sits on the accumulator]
Each leaf that requires grad has one `AccumulateGrad` node, which adds incoming gradients to `.grad`. The hook is a
post-hook of that node: it fires after `.grad` has its value, once per backward that reaches the leaf, even if the
gradient is undefined (a function returned None for it). `Tensor.register_post_accumulate_grad_hook` would not fire
then, and the bucket would never be complete. The leaf has only a weak reference to its node, so the owner of the
hooks must keep the nodes alive.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import unserializable_hook


def _do_nothing(*_arguments: object) -> None: ...


class GradientHooks:
    """Calls `handler(i)` whenever a backward has given `params[i].grad` its value.

    The engine keeps the hooks alive as long as the parameters, so `handler` must refer to the wrapper only weakly,
    see `weakly`. `on_error` is called with each exception that `handler` raises. `accumulators[i]` is the node of
    parameter i. See [Note: the hook sits on the accumulator].
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        handler: Callable[[int], object] = _do_nothing,
        names: Sequence[str] = (),
    ):
        self.params = params
        self._names = names
        self.handler = handler
        self.on_error: Callable[[Exception], object] = _do_nothing
        self._follows_conversions = False
        self._lock = threading.RLock()
        self.accumulators: list[Node] = []
        self._install()

    def _install(self) -> None:
        # The engine has one thread per device.
        fire = self._fire_one_by_one if len({param.device for param in self.params}) > 1 else self._fire
        self.accumulators = [
            get_gradient_edge(param).node if param.requires_grad else self.accumulators[i]  # frozen since
            for i, param in enumerate(self.params)
        ]
        self._handles = [node.register_hook(partial(fire, i)) for i, node in enumerate(self.accumulators)]

    def _fire(self, param: int, *_from_engine: object) -> None:
        try:
            self.handler(param)
        except Exception as error:
            self.on_error(error)
            raise

    def _fire_one_by_one(self, param: int, *_from_engine: object) -> None:
        with self._lock:
            self._fire(param)

    def renew(self) -> None:
        """Hook the new accumulators of parameters whose dtype has changed, too. Older graphs keep the old ones."""
        self._follows_conversions = True
        before = dict(zip(self.accumulators, self._handles, strict=True))
        self._install()
        for node in before.keys() & self.accumulators:
            before[node].remove()

    def check_conversions(self, params: Iterable[int]) -> None:
        """Raise if one of `params`, whose hooks do not fire in this backward, has been converted."""
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # `torch.func.grad` and others
        if self._follows_conversions or is_transformed:
            return
        for index in params:
            param, hooked = self.params[index], self.accumulators[index]
            if param.requires_grad and get_gradient_edge(param).node is not hooked:
                raise RuntimeError(
                    f"Gradients of this backward are not averaged: parameters, such as `{self._names[index]}`, "
                    f"were converted or moved (`.to`, `.double`, `.cpu`) after the module was wrapped, even back "
                    f"and forth. Clear the gradients, and wrap the module again, on every rank."
                )

    def remove(self) -> None:
        """Detach from the parameters. May be called twice."""
        for handle in self._handles:
            handle.remove()


def weakly(method: Any) -> Callable[..., Any]:
    """A function that calls the bound `method` while its object is alive, and then does nothing."""
    owner_ref, function = weakref.ref(method.__self__), method.__func__  # a WeakMethod is slow

    def call(*args: Any) -> Any:
        owner = owner_ref()
        return None if owner is None else function(owner, *args)

    return call


def will_be_reached(accumulator: Node) -> bool:
    """True if the backward that is running will run this node. See [Note: unused parameters]."""
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:
        if current_backward() < 0:
            raise
        return False  # autograd.grad() returns this gradient without accumulating it


def call_at_end_of_backward(callback: Callable[[], Any], on_failure: Callable[[], Any] = _do_nothing) -> None:
    """Call `callback` when the running backward ends, or `on_failure` if it raises.

    Within a nested backward (reentrant checkpointing) this is the nested one.
    """
    Variable._execution_engine.queue_callback(_EndCallback(callback, on_failure))


class _EndCallback:
    """The engine calls it at the end of a backward, or frees it without a call after an exception."""

    def __init__(self, callback: Callable[[], Any], on_failure: Callable[[], Any]):
        self._callback, self._on_failure = callback, on_failure

    def __call__(self) -> None:
        self._on_failure = _do_nothing
        self._callback()

    def __del__(self) -> None:
        self._on_failure()


def current_backward() -> int:
    """The number of the running backward. A nested backward has a different number."""
    return torch._C._current_graph_task_id()


def inside_another_backward() -> bool:
    """In an end-of-backward callback: True if an outer backward is running."""
    return torch._C._current_autograd_node() is not None


def call_when_gradient_enters(
    output: Any, callback: Callable[[set[int], int | None], None], *, before_other_hooks: bool = False
) -> set[int]:
    """Call the method `callback` whenever a backward reaches a tensor in `output`.

    Returns the places of the tensors that no backward has reached, and keeps that set up to date. The arguments of
    the call are this set, and the place of this tensor if it is reached for the first time, else `None`. The call
    is made within the backward that the user called, whereas the hooks of parameters may fire in nested backwards
    (reentrant checkpointing). The method's object is referenced weakly, since the output may outlive the wrapper.

    An in-place operation on a view gives the view another node, which the hook does not follow. The base of the
    view keeps its node, so it is hooked, too.
    """
    call = weakly(callback)
    tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    unreached = set(range(len(tensors)))

    def on_gradient(place: int, _grad: torch.Tensor) -> None:
        new_place = place if place in unreached else None
        unreached.discard(place)
        call(unreached, new_place)

    bases = [base for tensor in tensors if (base := tensor._base) is not None and base.grad_fn is not None]
    for place, tensor in enumerate([*tensors, *bases]):
        handle = tensor.register_hook(unserializable_hook(partial(on_gradient, place)))
        if before_other_hooks:
            hooks: Any = tensor._backward_hooks  # called in the order of insertion
            for other in [key for key in hooks if key != handle.id]:
                hooks[other] = hooks.pop(other)
    return unreached


def recorded(name: str) -> AbstractContextManager[object]:
    """A span in torch's profiler if one is on. `record_function` takes 25 µs even if none is on."""
    profiler = torch.autograd.profiler
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


def distributed_context() -> int | None:
    """The current distributed autograd context (torch's RPC) of the calling thread, if any."""
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is None or not rpc.is_available() or not rpc.api._is_current_rpc_agent_set():
        return None
    try:
        return torch._C._distributed_autograd._current_context()._context_id()
    except RuntimeError:
        return None  # outside of any context


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in nested lists, tuples, dicts, dataclasses and RRefs that this process owns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif hasattr(value, "local_value") and value.is_owner():  # an RRef, of torch's RPC
        yield from tensors_in(value.local_value())
