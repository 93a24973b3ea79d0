"""What scripts do with outputs: change them in place, keep them, hang hooks on them, give each a backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.parity.side import tensors_in

if TYPE_CHECKING:
    from tests.parity.side import Side

#: Ways to change a tensor of shape (batch, classes) in place; each returns the tensor to go on with.
IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "squeeze_": lambda output: output.squeeze_(),
    "unsqueeze_": lambda output: output.unsqueeze_(0),
    "t_": lambda output: output.t_(),
    "mul_": lambda output: output.mul_(2.0),
    "view": lambda output: output.view(-1).mul_(2.0),
    "alias": lambda output: (output[:].mul_(2.0), output)[1],
    "detached": lambda output: (output.detach().mul_(2.0), output)[1],
}


def change_output(side: Side, kind: str, how: str) -> list[torch.Tensor]:
    """A step whose loss is computed from an output of that kind after a change in place, as `IN_PLACE` has it.

    Where it is to change the "second", the loss is computed from the first.
    """
    side.zero()
    before, side.model.output = side.model.output, kind
    try:
        outputs = side.forward()
    finally:
        side.model.output = before
    if how == "second":
        outputs.pop().mul_(2.0)
    else:
        outputs[0] = IN_PLACE[how](outputs[0])
    side.backward(side.loss(outputs))
    return outputs


def heads(side: Side, kind: str, order: str) -> list[torch.Tensor]:
    """Outputs of that kind, see `Network`, with a backward for each: "in order", "reversed", or one "at once".

    An input that is an output has a graph of its own.
    """
    side.zero()
    before, side.model.output = side.model.output, kind
    batch = side.batch()
    try:
        outputs = side.outputs_of(side.ddp(replace(batch, x=batch.x.requires_grad_() * 1.0)))
    finally:
        side.model.output = before
    losses = [side.loss([output]) for output in outputs if output.requires_grad]
    if order == "at once":
        side.wants_step = True
        torch.autograd.backward(losses)
    else:
        for loss in losses if order == "in order" else losses[::-1]:
            side.backward(loss, retain_graph=True)
    return outputs


def keep_outputs(side: Side, of: str) -> list[torch.Tensor]:
    """The script keeps outputs of an ordinary step: those of the "wrapper", or of the "module" by a hook of it."""
    if of == "wrapper":
        outputs = side.train()
        side.kept += outputs
        return outputs
    handle = side.model.register_forward_hook(
        lambda _module, _inputs, output: side.kept.extend(side.outputs_of(output))
    )
    try:
        return side.train()
    finally:
        handle.remove()


def hook_forward(side: Side, layer: int, what: str) -> None:
    """From now on a forward hook changes in place the output of a "layer", of the "module", or a "kept" output.

    The last one keeps each output of the module, and changes it when the next one comes.
    """

    def change(_module: nn.Module, _inputs: Any, output: Any) -> None:
        [main, *_] = side.outputs_of(output)
        if what != "kept":
            main.mul_(0.5)
        else:
            for before in memory:
                before.mul_(0.5)
            memory[:] = [main.detach()]

    memory: list[torch.Tensor] = []
    module = side.layer(layer) if what == "layer" else side.model
    side.handles.append(module.register_forward_hook(change))


def hook_output(side: Side, where: str) -> None:
    """From now on a tensor hook halves the gradient of the "output" or the "module"'s, or keeps the "input"'s."""
    if where == "output":
        side.on_output.append(lambda output: output.register_hook(lambda grad: grad * 0.5))
    elif where == "input":
        side.on_input.append(lambda x: x.register_hook(lambda grad: side.kept.append(grad.clone())))
    else:
        side.handles.append(side.model.register_forward_hook(_halve_grad_of_output))


def _halve_grad_of_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
    for tensor in tensors_in(output)[:1]:
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: grad * 0.5)
