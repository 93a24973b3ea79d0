"""What scripts do with gradients: hooks that change them, other tensors in their place, tensors kept for later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from tests.parity.side import Side


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _replace(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


def _clear(param: torch.Tensor) -> None:
    param.grad = None


HOOKS_AFTER = {"halve": _halve, "replace": _replace, "clear": _clear}


def hook_before(side: Side, layer: int) -> None:
    """Tensor hooks change what arrives at a layer's parameters."""
    side.handles += [param.register_hook(lambda grad: grad * 0.5) for param in side.params_of(layer)]


def hook_after(side: Side, layer: int, what: str) -> None:
    """Post-accumulate hooks change a layer's gradients, as `HOOKS_AFTER` has it."""
    hook = HOOKS_AFTER[what]
    side.handles += [param.register_post_accumulate_grad_hook(hook) for param in side.params_of(layer)]


def keep_in_hook(side: Side, layer: int) -> None:
    """A post-accumulate hook keeps each gradient of a layer."""
    side.handles += [
        param.register_post_accumulate_grad_hook(lambda param: side.kept.append(param.grad))
        for param in side.params_of(layer)
    ]


def remove_hooks(side: Side) -> None:
    side.remove_hooks()


def keep_grads(side: Side, how: str) -> None:
    """The script keeps gradients: the tensors, "detached" ones, or "rows" of them. They are compared later."""
    take = {"tensors": lambda grad: grad, "detached": torch.Tensor.detach, "rows": lambda grad: grad.view(-1)[:1]}[
        how
    ]
    side.grads_once = {name: param.grad for name, param in side.named_params.items()}
    grads = [param.grad for param in side.model.parameters() if param.grad is not None]
    side.kept += [take(grad) for grad in grads if not grad.is_sparse and grad.is_contiguous()]


def forget_grads(side: Side) -> None:
    """The script drops all that it has kept."""
    side.kept, side.grads_once = [], {}


def put_grads(side: Side, how: str) -> None:
    """Another tensor in the place of each `.grad`, or other "data" in it: the next step adds to it."""
    for param in side.named_params.values():
        grad = param.grad
        if how == "zeros" and param.requires_grad:
            param.grad = torch.zeros_like(param)
        elif how == "none":
            param.grad = None
        elif how == "data" and grad is not None:
            grad.data = grad.data * 0.5
        elif grad is not None:
            param.grad = {
                "clone": grad.clone,
                "scaled": lambda grad=grad: grad * 0.5,
                "detached": grad.detach,
            }[how]()
    side.keeps_grads_once = True


def restore_grads(side: Side) -> None:
    """Put the tensors of the last `keep_grads` back in the place of `.grad`: the next step adds to them."""
    if side.grads_once:
        for name, param in side.named_params.items():
            param.grad = side.grads_once[name]
        side.keeps_grads_once = True


def zero_by(side: Side, how: str) -> None:
    """What later steps begin with: zero_grad to "none", to "zeros", or not at all ("keep")."""
    side.zeroing = how


def clip(side: Side) -> None:
    """From now on gradients are clipped by norm."""
    side.clips = True


def optimizer(side: Side, kind: str) -> None:
    """Another optimizer."""
    side.use_optimizer(kind)


def put_data(side: Side, layer: int, how: str) -> None:
    """Other values in a layer's parameters: `param.data = ...` ("new memory"), or "in place"."""
    for param in side.params_of(layer):
        if how == "new memory":
            param.data = param.data * 0.9
        else:
            param.data.copy_(param.data * 0.9)


def freeze(side: Side, layer: int) -> None:
    side.layer(layer).requires_grad_(False)


def thaw(side: Side) -> None:
    """All layers require grad again, but for what never did."""
    side.model.thaw()


def call_at_end(side: Side, layer: int, by: str, does: str, late: bool) -> list[torch.Tensor]:
    """A step in which a hook queues a callback for the end of backward, to "read", "halve" or "clip" gradients.

    `by` is the hook: that of a "weight" of the layer, its full backward hook ("module"), or one at the "input", at
    the wrapper's "output" or, "inside" the wrapper, at the module's. If `late` the callback queues another one that
    does it, behind all that were queued before.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    params = list(side.named_params.values())

    def act() -> None:
        if does == "read":
            side.kept += _copies(params)
        elif does == "clip":
            nn.utils.clip_grad_norm_([param for param in params if param.grad is not None], 0.1)
        else:
            for param in params:
                if param.grad is not None:
                    param.grad = param.grad * 0.5

    def on_grad(*_from_engine: object) -> None:
        queue((lambda: queue(act)) if late else act)

    def on_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in side.outputs_of(output)[:1]:
            tensor.register_hook(on_grad)

    with contextlib.ExitStack() as hooks:
        if by == "module":
            hooks.enter_context(side.layer(layer).register_full_backward_hook(on_grad))
        elif by == "weight":
            for param in side.params_of(layer)[:1]:
                hooks.enter_context(param.register_hook(on_grad))
        elif by == "inside":
            hooks.enter_context(side.model.register_forward_hook(on_output))
        else:
            actions = side.on_input if by == "input" else side.on_output
            actions.append(lambda tensor: tensor.register_hook(on_grad))
            hooks.callback(actions.pop)
        return side.train()


def hook_backward(side: Side, layer: int, of: str, does: str) -> None:
    """A full backward hook of a "layer" or of the whole "module" halves what it passes on, or reads gradients."""

    def on_backward(_module: nn.Module, grads: tuple[torch.Tensor | None, ...], _of_outputs: object) -> Any:
        if does == "halve":
            return tuple(None if grad is None else grad * 0.5 for grad in grads)
        side.kept += _copies(side.named_params.values())
        return None

    module = side.layer(layer) if of == "layer" else side.model
    side.handles.append(module.register_full_backward_hook(on_backward))


def _copies(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Of all gradients; none is as good as an empty one."""
    grads = [torch.empty(0) if param.grad is None else param.grad for param in params]
    return [grad.detach().clone() for grad in grads]
