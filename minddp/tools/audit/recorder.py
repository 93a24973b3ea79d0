"""Recording on one rank: a sketch of each backward's gradient, and one of what the optimizer gets.

A hook of the parameter's tensor sees the gradient before it is added to `.grad`, so before anything averages it.
With FSDP2 the gradient arrives in another tensor than the optimizer's. A hook of optimizers sees `.grad` before the
step, or at the end of the step's closure; of nested steps the innermost counts, since a subclass may average before
`super().step()`. A step ends when the next backward begins, so several optimizers may follow one backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from minddp.platform import wording
from minddp.tools.audit.loss import Loss, read_loss
from minddp.tools.audit.sketch import Sketcher
from minddp.tools.watchdog.rank_state import where_is_main_thread


@dataclass
class MicroBatch:
    """A backward: the line of the script, the loss, and sketches [parameters, 64]."""

    line: str
    loss: Loss
    sketches: Any = 0.0


class Clip(NamedTuple):
    """A call of `clip_grad_norm_`."""

    line: str
    factor: float


@dataclass
class StepSketches:
    """A step of one rank: what was `left` in `.grad` before it, and `final`, of the parameters that `are_final`."""

    left: Any
    final: Any
    are_final: Any
    micro_batches: list[MicroBatch] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)


class AuditedParam(NamedTuple):
    """A parameter as the optimizer has it, and the tensor in which its gradients arrive."""

    name: str
    param: Tensor
    arrives_in: Tensor


def audited_params(model: nn.Module | None, optimizers: Iterable[Optimizer]) -> list[AuditedParam]:
    """The optimizers' parameters, or the model's; named as in the model.

    Raises:
        RuntimeError: FSDP2 has not made its tensors yet, or a parameter is sharded by something else.
    """
    modules = [] if model is None else [it for it in model.modules() if isinstance(it, FSDPModule)]
    groups: list[Any] = [group for it in modules for group in it._get_fsdp_state()._fsdp_param_groups]
    sharded = [param for group in groups for param in group.fsdp_params]
    if not all(hasattr(param, "_unsharded_param") for param in sharded):
        raise RuntimeError("FSDP2 has not run this model yet. Let it take a step before the audit: warm_up=1.")
    arrives_in = {id(param.sharded_param): param._unsharded_param for param in sharded}
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    found = [param for one in optimizers for group in one.param_groups for param in group["params"]]
    params = [
        AuditedParam(names.get(id(param), f"parameter {place}"), param, arrives_in.get(id(param), param))
        for place, param in enumerate(dict.fromkeys(found or ([] if model is None else model.parameters())))
        if param.requires_grad
    ]
    if parts := [one.name for one in params if isinstance(one.arrives_in, DTensor)]:
        raise RuntimeError(
            f"Of {wording.names(parts)} a rank has a part of each gradient (tensor parallelism), and an audit "
            "needs the whole. Audit the script without parallelize_module."
        )
    return params


class GradientRecorder:
    """Records until `stop`; `steps` are over. `weight()` is a backward's weight, or 0: that of its elements."""

    def __init__(self, params: Sequence[AuditedParam], weight: Callable[[], float], on_step: Callable[[int], None]):
        self.params = params
        self.steps: list[StepSketches] = []
        self._weight, self._on_step = weight, on_step
        self._places = {id(one.param): place for place, one in enumerate(params)}
        self._sketcher = Sketcher([one.param for one in params])
        self._step: StepSketches | None = None  # under way
        self._depth = 0  # of nested backwards
        self._undo = ExitStack()
        for place, one in enumerate(params):
            handle = one.arrives_in.register_hook(functools.partial(self._on_gradient, place))
            self._undo.callback(handle.remove)
            hooks: Any = one.arrives_in._backward_hooks
            for other in [key for key in hooks if key != handle.id]:  # after ours, since they may average
                hooks[other] = hooks.pop(other)
        self._replace(torch.autograd, "_engine_run_backward", self._backward)
        self._replace(clip_grad, "_clip_grads_with_norm_", self._clip)

    def _replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        self._undo.callback(setattr, owner, name, original)
        setattr(owner, name, functools.partial(call, original))

    def stop(self) -> list[StepSketches]:
        """All whole steps, as arrays."""
        self._undo.close()
        self._close_step()
        for step in self.steps:
            step.micro_batches = [one for one in step.micro_batches if one.sketches.any()]
        for holder in [holder for step in self.steps for holder in (step, *step.micro_batches)]:
            vars(holder).update({k: v.cpu().numpy() for k, v in vars(holder).items() if isinstance(v, Tensor)})
        return self.steps

    def _close_step(self) -> bool:
        if self._step is None or not self._step.are_final.any():
            return False
        self.steps.append(self._step)
        self._step = None
        return True

    def _backward(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Behind `backward` and `autograd.grad`. A backward within one is a part of it."""
        if self._depth == 0:
            self._begin(outputs[0])
        self._depth += 1
        try:
            return original(outputs, *args, **kwargs)
        finally:
            self._depth -= 1
            self._take_backward()

    def _begin(self, root: Any) -> None:
        if self._close_step():
            self._on_step(len(self.steps))
        if self._step is None:
            left, _ = self._sketch([one.param for one in self.params])
            self._step = StepSketches(left, torch.zeros_like(left), torch.zeros(len(left), dtype=torch.bool))
        loss = read_loss(root)
        loss.elements = self._weight() or loss.elements
        self._step.micro_batches.append(MicroBatch(where_is_main_thread(), loss))

    def _on_gradient(self, place: int, grad: Tensor | None) -> None:
        if self._step is not None and grad is not None and self._depth:
            self._sketcher.add(place, grad)

    def _take_backward(self) -> None:
        if self._step is not None:
            self._step.micro_batches[-1].sketches += self._sketcher.take()

    def _sketch(self, params: Iterable[Tensor]) -> tuple[Tensor, list[int]]:
        """Sketches of their `.grad`, [parameters, 64], and the places of those that have one."""
        places = []
        for param in params:
            if param.grad is not None and (place := self._places.get(id(param), -1)) >= 0:
                self._sketcher.add(place, param.grad)
                places.append(place)
        return self._sketcher.take(), places

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The hook of optimizers; returns other arguments if there is a closure."""
        closure = kwargs.get("closure") or next(filter(callable, args[1:]), None)
        if closure is None:
            return self.take(optimizer)

        def with_sketch() -> Any:
            loss = closure()
            self.take(optimizer)
            return loss

        return (args[0],), {**kwargs, "closure": with_sketch}

    def take(self, optimizer: Optimizer | None = None) -> None:
        """Sketch the gradients that are about to be used: the optimizer's, or all."""
        if self._step is None:
            return
        groups = [] if optimizer is None else optimizer.param_groups
        params = [param for group in groups for param in group["params"]] or [one.param for one in self.params]
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler, by which this optimizer divides itself
        self._take_backward()  # in which a hook may have called the optimizer
        sketches, places = self._sketch(params)
        self._step.final[places] = sketches[places] / (1.0 if scale is None else scale)
        self._step.are_final[places] = True

    def _clip(self, original: Callable[..., Any], params: Any, most: float, norm: Tensor, *more: Any) -> Any:
        """Behind `clip_grad_norm_`."""
        if self._step is not None:
            length = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            self._step.clips.append(Clip(where_is_main_thread(), min(1.0, float(most) / (length + 1e-6))))
        return original(params, most, norm, *more)
