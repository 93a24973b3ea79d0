"""Guards of modules that call none: torch's wrapper, FSDP2, or any module in a loop of the script.

[Note: torch's wrapper from outside]
While a process is watched, three methods of torch's class, which torch's `replicate` uses too, call its guard. A
hook on an output shows where a backward begins. Then the engine is asked for a call at the backward's end: it comes
before the one in which torch waits for its buckets, and asks for another one, which comes after that.

[Note: the end of a backward without a wrapper]
FSDP2 reduces gradients within backward; a script may average them anywhere. So the guard takes an optimizer's step
for the end of a backward. Replicas that differ may be averaged later (local SGD): it reports them after `PATIENCE`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from minddp.core.autograd import call_at_end_of_backward, call_when_gradient_enters
from minddp.ddp import DistributedDataParallel
from minddp.tools.watchdog.check import ALONE
from minddp.tools.watchdog.fingerprint import shard_name
from minddp.tools.watchdog.guard import Guard, checks_of
from minddp.tools.watchdog.misuse import NamedParams
from minddp.tools.watchdog.rank_state import RankState
from minddp.transport.process_group import ProcessGroupTransport

TOPIC = "minddp/watch"
PATIENCE = 2 * ALONE  # steps


class StepGuard(Guard):
    """See [Note: the end of a backward without a wrapper]. The first optimizer to step counts."""

    steps_are_passes = True

    def __init__(self, module: nn.Module):
        named = named_params(module)
        shards = [(shard_name(name, param), param) for name, param in named]
        checks = checks_of(shards, starts_equal=True, patience=PATIENCE)
        checks = {name: check for name, check in checks.items() if name not in ("bypass", "slow_rank")}
        super().__init__(named, ProcessGroupTransport(dist.group.WORLD, TOPIC), checks)  # type: ignore[arg-type]
        if getattr(module, "_compiled_call_impl", None) is None:  # which would compile the hook
            handle = module.register_forward_pre_hook(InputHook(self), with_kwargs=True)
            weakref.finalize(self, handle.remove).atexit = False

    def state(self) -> RankState:
        return RankState(backward=self.step)


class InputHook:
    """Shows a guard the inputs of a module. In a copy of the module it does nothing."""

    def __init__(self, guard: Guard | None = None):
        self._guard = (lambda: None) if guard is None else weakref.ref(guard)

    def __call__(self, _module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and (guard := self._guard()) is not None:
            guard.before_module(inputs, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return InputHook, ()


class WrapperGuard(Guard):
    """See [Note: torch's wrapper from outside]. The phases are named like those of minddp's reducer."""

    def __init__(self, ddp: TorchDDP):
        named = [(name, param) for name, param in named_params(ddp.module) if name not in ddp.parameters_to_ignore]
        super().__init__(
            named, ProcessGroupTransport(ddp.process_group, TOPIC), checks_of(named, starts_equal=True)
        )
        self._ddp, self._params = weakref.ref(ddp), named
        self._phase = "IDLE"
        self._num_hooks = 0

    def pre_forward(self, hooks: list[Any]) -> None:
        for hook, state in hooks[self._num_hooks :]:
            self.call("communication_hook", getattr(hook, "__qualname__", repr(hook)), state)
        self._num_hooks = len(hooks)
        if self._phase in ("ACCUMULATING", "FINALIZING"):  # an exception has ended the backward
            self._backward_ends()
        self.call("pre_forward")

    def module_has_run(self, output: Any, synchronises: bool) -> None:
        self.call("post_forward", synchronises)
        if synchronises:
            self._phase = "PREPARED"
            call_when_gradient_enters(output, self._gradient_enters)

    def _gradient_enters(self, _unreached: set[int], _place: int | None) -> None:
        if self._phase == "PREPARED":
            self._phase = "ACCUMULATING"
            self.first_gradient(-1)
            call_at_end_of_backward(self._gradients_complete)

    def _gradients_complete(self) -> None:
        self._phase = "FINALIZING"
        self.before_unpack()
        call_at_end_of_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        self._phase = "IDLE"
        self.post_backward()

    def state(self) -> RankState:
        lacks = [name for name, param in self._params if param.grad is None]
        missing = tuple(lacks) if len(lacks) < len(self._params) else ()
        ddp, phase = self._ddp(), self._phase
        accumulates = ddp is not None and not ddp.require_backward_grad_sync
        is_incomplete = phase == "IDLE" and missing and not accumulates
        backward = self.step + (phase == "ACCUMULATING")
        return RankState("INCOMPLETE" if is_incomplete else phase, backward, accumulates, missing)


def named_params(module: nn.Module) -> NamedParams:
    return [(name, param) for name, param in module.named_parameters() if param.requires_grad]


def guarding_wrappers(guard_of: Any) -> ExitStack:
    """Torch's wrappers call `guard_of(ddp)`, a guard or `None`, until the result is closed."""
    pre_forward, post_forward = TorchDDP._pre_forward, TorchDDP._post_forward
    shadow = TorchDDP._match_all_reduce_for_bwd_pass

    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or (guard := guard_of(self)) is None:
            return pre_forward(self, *inputs, **kwargs)
        guard.pre_forward(self._comm_hooks)
        inputs, kwargs = pre_forward(self, *inputs, **kwargs)
        guard.before_module(inputs, kwargs)
        return inputs, kwargs

    def _post_forward(self: Any, output: Any) -> Any:
        output = post_forward(self, output)
        if torch.is_grad_enabled() and (guard := guard_of(self)) is not None:
            guard.module_has_run(output, self.require_backward_grad_sync)
        return output

    def _match_all_reduce_for_bwd_pass(self: Any) -> None:
        """This rank has run out of inputs, and takes part in a backward of the others."""
        shadow(self)
        if (guard := guard_of(self)) is not None:
            guard.shadow_begins()

    undo = ExitStack()
    for function in (_pre_forward, _post_forward, _match_all_reduce_for_bwd_pass):
        undo.callback(setattr, TorchDDP, function.__name__, getattr(TorchDDP, function.__name__))
        setattr(TorchDDP, function.__name__, function)
    return undo


def module_of(optimizers: Iterable[torch.optim.Optimizer], *, innermost: bool = False) -> nn.Module | None:
    """The module that these train: a wrapper if there is one, else the smallest with most parameters."""
    ids = {id(param) for one in optimizers for group in one.param_groups for param in group["params"]}

    def order(module: nn.Module) -> tuple[int, bool, int, bool, int]:
        number = sum(id(param) in ids for param in module.parameters())
        is_wrapper = isinstance(module, (TorchDDP, DistributedDataParallel)) and not innermost
        is_compiled = type(module).__name__ == "OptimizedModule" and not innermost  # a hook would be compiled
        return number > 0, is_wrapper, number, is_compiled, -sum(1 for _ in module.modules())

    modules = [it for it in gc.get_objects() if issubclass(type(it), nn.Module) and "_parameters" in vars(it)]
    best = max(modules, default=None, key=order)
    return best if best is not None and order(best)[0] else None
