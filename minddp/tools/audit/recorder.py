"""Recording on one rank: a sketch of each backward's gradient, and one of what the optimizer gets.

A hook of the parameter's tensor sees a backward's gradient before it is added to `.grad`, so before any wrapper or
script averages it; it is put before hooks that the script has registered. FSDP2 computes with another tensor than the
optimizer's, which is hooked instead. Before the first of a step, the sketch of what is left in `.grad` is taken.

An optimizer's hook sees `.grad` before the step; for a step with a closure, after the closure. If steps are nested, the
innermost counts, since a subclass may average before it calls `super().step()`. A step ends when the next backward
begins, so that several optimizers may follow one backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer

from minddp.tools.audit.loss import Loss, read_loss
from minddp.tools.audit.sketch import NUMBERS, Sketcher
from minddp.tools.watchdog.rank_state import where_is_main_thread


@dataclass
class MicroBatch:
    """A backward: the line of the script, its loss, the weight it should have, and [parameters, 64] sketches."""

    line: str
    loss: Loss
    weight: float | None
    sketches: Any


@dataclass
class Clip:
    """A call of `clip_grad_norm_`: the line, the factor, and how many of the step's backwards came before it."""

    line: str
    factor: float
    after: int


@dataclass
class StepSketches:
    """A step of one rank. `is_final`: the parameters that an optimizer has stepped on, whose sketches are `final`.

    `leftover`: what was in `.grad` before the first backward.
    """

    leftover: Any
    final: Any
    is_final: Any
    micro_batches: list[MicroBatch] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)


@dataclass(frozen=True)
class AuditedParam:
    """A parameter as the optimizer has it, and the tensor in which backward's gradients arrive."""

    name: str
    param: Tensor
    hooked: Tensor

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.param, DTensor)


def audited_params(model: nn.Module | None, optimizers: Iterable[Optimizer]) -> list[AuditedParam]:
    """The optimizers' parameters, with their names in the model if there is one; without optimizers, the model's."""
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    hooked: dict[int, Tensor] = {}
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[attr-defined]
                for one in group.fsdp_params:
                    if not hasattr(one, "_unsharded_param"):
                        raise RuntimeError(
                            "FSDP2 has not run this module yet: take a step before the audit begins."
                        )
                    hooked[id(one.sharded_param)] = one._unsharded_param
    steps_on = [param for one in optimizers for group in one.param_groups for param in group["params"]]
    params = steps_on or ([] if model is None else list(model.parameters()))
    return [
        AuditedParam(names.get(id(param), f"parameter {index}"), param, hooked.get(id(param), param))
        for index, param in enumerate(dict.fromkeys(params))
        if param.requires_grad
    ]


class Recorder:
    """Records from now on until `stop`; `steps` are those that are over. `weight()` gives a backward's weight."""

    def __init__(self, params: Sequence[AuditedParam], weight: Callable[[], float] | None = None):
        self.params = params
        self.steps: list[StepSketches] = []
        self.when_step_begins: Callable[[], None] = lambda: None
        self._weight = weight
        self._device = params[0].param.device
        self._index_of = {id(one.param): index for index, one in enumerate(params)}
        # By the place of a parameter in the list and its size, which are the same on all ranks.
        self._sketchers = [Sketcher(i, one.param.numel(), one.param.device) for i, one in enumerate(params)]
        # The step under way, and the parameters that have had a gradient in it
        self._step: StepSketches | None = None
        self._reached: set[int] = set()
        # The depth of nested backwards, and whether this one has reached a parameter
        self._depth = 0
        self._has_arrived = False
        self._is_over = False
        # What is to be undone
        self._handles = [one.hooked.register_hook(self._hook_of(i)) for i, one in enumerate(params)]
        for one, handle in zip(params, self._handles, strict=True):
            hooks: Any = one.hooked._backward_hooks
            hooks.move_to_end(handle.id, last=False)
        self._replaced: list[tuple[Any, str, Any]] = []
        self._replace(torch.autograd, "_engine_run_backward", self._run_backward)
        self._replace(clip_grad, "_clip_grads_with_norm_", self._clip)

    def stop(self) -> list[StepSketches]:
        """End the recording. Returns all whole steps, with arrays in place of tensors."""
        self._is_over = True
        for handle in self._handles:
            handle.remove()
        for owner, name, original in self._replaced:
            setattr(owner, name, original)
        self._close_step()
        return [_on_host(step) for step in self.steps]

    # ------------------------------------------------------------------ backward

    def _replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        self._replaced.append((owner, name, original))
        setattr(owner, name, functools.wraps(original)(functools.partial(call, original)))

    def _run_backward(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of torch's function behind `backward` and `autograd.grad`. A nested one is a part of the outer."""
        self._depth += 1
        try:
            if self._depth == 1:
                self._begin_micro_batch(outputs[0] if outputs else None, args[0][0] if args and args[0] else None)
            return original(outputs, *args, **kwargs)
        finally:
            self._depth -= 1
            if self._depth == 0 and self._step is not None and not self._has_arrived:
                self._step.micro_batches.pop()  # it has reached none of our parameters

    def _begin_micro_batch(self, root: Any, gradient: Any) -> None:
        if self._step is not None and self._step.is_final.any():
            self._close_step()
            self.when_step_begins()
            if self._is_over:
                return
        if self._step is None:
            self._step = StepSketches(self._zeros(), self._zeros(), np.zeros(len(self.params), bool))
            self._reached.clear()
        self._has_arrived = False
        weight = None if self._weight is None else float(self._weight())
        batch = MicroBatch(where_is_main_thread(), read_loss(root, gradient), weight, self._zeros())
        self._step.micro_batches.append(batch)

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.params), NUMBERS, dtype=torch.float64, device=self._device)

    def _hook_of(self, index: int) -> Callable[[Tensor], None]:
        param, sketch = self.params[index].param, self._sketchers[index]

        def on_gradient(grad: Tensor | None) -> None:
            if self._step is None or not self._depth or grad is None:
                return
            self._has_arrived = True
            if index not in self._reached:
                self._reached.add(index)
                if param.grad is not None:
                    self._step.leftover[index] = sketch(param.grad)
            self._step.micro_batches[-1].sketches[index] += sketch(grad)

        return on_gradient

    # ------------------------------------------------------------------ the step

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """A hook of an optimizer's step: sketch `.grad`, or return arguments whose closure ends with that."""
        closure = kwargs.get("closure") or next(filter(callable, args[1:]), None)
        if closure is None:
            return self.take_gradients(optimizer)

        def closure_and_sketch() -> Any:
            loss = closure()
            self.take_gradients(optimizer)
            return loss

        changed = tuple(closure_and_sketch if argument is closure else argument for argument in args)
        return changed, {**kwargs, **({"closure": closure_and_sketch} if "closure" in kwargs else {})}

    def take_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Sketch the gradients that the optimizer is about to use; of all parameters, if there is no optimizer."""
        if self._step is None:
            return
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler, if the optimizer divides by it itself
        groups = [] if optimizer is None else optimizer.param_groups
        params = [param for group in groups for param in group["params"]] or [one.param for one in self.params]
        for param in params:
            if (index := self._index_of.get(id(param))) is not None and param.grad is not None:
                sketch = self._sketchers[index](param.grad)
                self._step.final[index] = sketch if scale is None else sketch / scale
                self._step.is_final[index] = True

    def _clip(self, original: Callable[..., Any], parameters: Any, max_norm: float, norm: Tensor, *more: Any) -> Any:
        """In place of torch's function behind `clip_grad_norm_`."""
        if self._step is not None:
            norm_there: Any = norm.full_tensor() if isinstance(norm, DTensor) else norm
            factor = min(1.0, float(max_norm) / (float(norm_there) + 1e-6))
            self._step.clips.append(Clip(where_is_main_thread(), factor, len(self._step.micro_batches)))
        return original(parameters, max_norm, norm, *more)

    def _close_step(self) -> None:
        if self._step is not None and self._step.is_final.any():
            self.steps.append(self._step)
        self._step = None


def _on_host(step: StepSketches) -> StepSketches:
    batches = [
        MicroBatch(batch.line, batch.loss, batch.weight, batch.sketches.cpu().numpy())
        for batch in step.micro_batches
    ]
    return StepSketches(
        step.leftover.cpu().numpy(), step.final.cpu().numpy(), step.is_final, batches, step.clips
    )
