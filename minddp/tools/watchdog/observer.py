"""Observers call a guard for a module that does not: torch's wrapper, FSDP2, or a module in a loop of the script.

[Note: torch's wrapper from outside]
While a process is watched, three methods of torch's class call its observer, which also serves torch's `replicate`.
A hook on an output shows where a backward begins. The observer then asks the engine for a call at the backward's
end: it runs before the one in which torch waits for its buckets, which is requested when the last of them leaves,
and requests a second one, which runs after that.

[Note: nobody knows when gradients are averaged]
FSDP2 reduces within backward, a script wherever it likes. So an optimizer's step is taken for the end of a
backward. Replicas that differ in some steps may be averaged later (local SGD): they get time.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from minddp.core.autograd import call_at_end_of_backward, call_when_gradient_enters
from minddp.ddp import DistributedDataParallel
from minddp.tools.watchdog.check import Check
from minddp.tools.watchdog.drift import STILL_APART, DriftCheck
from minddp.tools.watchdog.finite import NotFiniteCheck
from minddp.tools.watchdog.fingerprint import shard_name
from minddp.tools.watchdog.guard import Guard, checks_of, on_one_device
from minddp.tools.watchdog.misuse import NamedParams, SameDataCheck, SameOrderCheck
from minddp.tools.watchdog.rank_state import RankState
from minddp.transport.process_group import ProcessGroupTransport

TOPIC = "minddp/watch"


class Observer:
    """Calls `guard` for a module whose parameters that require grad are `params`."""

    def __init__(self, params: NamedParams, guard: Guard):
        self.params = params
        self.guard = guard

    def inputs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module is about to run."""
        self.guard.before_module(self.guard.step, inputs, kwargs)

    def state(self) -> RankState:
        return RankState(backward=self.guard.step)


class StepObserver(Observer):
    """See [Note: nobody knows when gradients are averaged]."""

    def __init__(self, module: nn.Module):
        named = named_params(module)
        here = [(shard_name(name, param), param) for name, param in on_one_device(named)]
        checks: dict[str, Check] = {
            "drift": DriftCheck(here, starts_equal=True, patience=STILL_APART, reducer=""),
            "same data": SameDataCheck(),
            "same order": SameOrderCheck(),
            "not finite": NotFiniteCheck(here),
        }
        transport = ProcessGroupTransport(dist.group.WORLD, TOPIC)  # type: ignore[arg-type]
        super().__init__(named, Guard(named, transport, checks, steps_are_passes=True))
        if getattr(module, "_compiled_call_impl", None) is None:  # which would compile the hook, too
            hook = InputHook(self)
            self._handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            weakref.finalize(self, self._handle.remove).atexit = False


class InputHook:
    """Of an observer that it does not keep. A copy of the module has one that does nothing."""

    def __init__(self, observer: Observer | None = None):
        self._observer = (lambda: None) if observer is None else weakref.ref(observer)

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and (observer := self._observer()) is not None:
            observer.inputs(inputs, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return InputHook, ()


class WrapperObserver(Observer):
    """See [Note: torch's wrapper from outside]. The phases are named like those of minddp's reducer."""

    def __init__(self, ddp: TorchDDP):
        named = [(name, param) for name, param in named_params(ddp.module) if name not in ddp.parameters_to_ignore]
        guard = Guard(named, ProcessGroupTransport(ddp.process_group, TOPIC), checks_of(named, starts_equal=True))
        super().__init__(named, guard)
        self._ddp = weakref.ref(ddp)
        self._phase = "IDLE"
        self._num_hooks = 0

    def pre_forward(self, hooks: list[Any]) -> None:
        for hook, state in hooks[self._num_hooks :]:
            self.guard.call("communication_hook", getattr(hook, "__qualname__", str(hook)), state)
        self._num_hooks = len(hooks)
        if self._phase in ("ACCUMULATING", "FINALIZING"):  # an exception has ended the backward
            self._end()
        self.guard.call("pre_forward")

    def post_forward(self, output: Any, synchronises: bool) -> None:
        self.guard.call("post_forward", synchronises)
        if synchronises:
            self._phase = "PREPARED"
            call_when_gradient_enters(output, self._begin)

    def joined(self) -> None:
        """This rank has no more inputs, and takes part in a backward of the others."""
        self.guard.step += 1
        self.guard.shadow_begins()

    def _begin(self, _unreached: set[int], _is_first: bool) -> None:
        if self._phase == "PREPARED":
            self._phase = "ACCUMULATING"
            self.guard.first_gradient(-1)
            call_at_end_of_backward(self._gradients_complete)

    def _gradients_complete(self) -> None:
        self._phase = "FINALIZING"
        self.guard.before_unpack()
        call_at_end_of_backward(self._end)

    def _end(self) -> None:
        self._phase = "IDLE"
        self.guard.post_backward()

    def state(self) -> RankState:
        has_grad = {name: param.grad is not None for name, param in self.params}
        missing = tuple(name for name, has in has_grad.items() if not has and any(has_grad.values()))
        is_idle, ddp = self._phase == "IDLE", self._ddp()
        accumulates = ddp is not None and not ddp.require_backward_grad_sync
        phase = "INCOMPLETE" if is_idle and missing and not accumulates else self._phase
        return RankState(phase, self.guard.step, accumulates, missing)


def named_params(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in module.named_parameters() if param.requires_grad]


def observing_wrappers(observer_of: Any) -> ExitStack:
    """Let torch's wrappers call `observer_of(ddp)`, which may be `None`, until the result is closed."""
    pre_forward, post_forward = TorchDDP._pre_forward, TorchDDP._post_forward
    match = TorchDDP._match_all_reduce_for_bwd_pass

    @wraps(pre_forward)
    def pre(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        observer = observer_of(self) if torch.is_grad_enabled() else None
        if observer is None:
            return pre_forward(self, *inputs, **kwargs)
        observer.pre_forward(self._comm_hooks)
        inputs, kwargs = pre_forward(self, *inputs, **kwargs)
        observer.inputs(inputs, kwargs)
        return inputs, kwargs

    @wraps(post_forward)
    def post(self: Any, output: Any) -> Any:
        output = post_forward(self, output)
        if torch.is_grad_enabled() and (observer := observer_of(self)) is not None:
            observer.post_forward(output, self.require_backward_grad_sync)
        return output

    @wraps(match)
    def joined(self: Any) -> None:
        match(self)
        if (observer := observer_of(self)) is not None:
            observer.joined()

    undo = ExitStack()
    replaced = {"_pre_forward": pre, "_post_forward": post, "_match_all_reduce_for_bwd_pass": joined}
    for name, function in replaced.items():
        undo.callback(setattr, TorchDDP, name, getattr(TorchDDP, name))
        setattr(TorchDDP, name, function)
    return undo


def module_of(optimizer: torch.optim.Optimizer) -> nn.Module | None:
    """The module that this optimizer trains: a wrapper if there is one, else the smallest with most parameters."""
    ids = {id(param) for group in optimizer.param_groups for param in group["params"]}

    def rank_of(module: nn.Module) -> tuple[bool, int, bool, int]:
        number = sum(id(param) in ids for param in module.parameters())
        is_compiled = type(module).__name__ == "OptimizedModule"  # a hook on the module itself would be compiled
        is_wrapper = isinstance(module, (TorchDDP, DistributedDataParallel))
        return is_wrapper and number > 0, number, is_compiled, -sum(1 for _ in module.modules())

    modules = [it for it in gc.get_objects() if issubclass(type(it), nn.Module)]
    best = max(modules, default=None, key=rank_of)
    return best if best is not None and rank_of(best)[1] else None
