"""Steps whose backward is not just one `loss.backward()` after one forward."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from tests.parity.changes import routes
from tests.parity.network import Interrupted

if TYPE_CHECKING:
    from tests.parity.side import Side


def again(side: Side) -> list[torch.Tensor]:
    """A second backward through the same graph."""
    side.zero()
    outputs = side.forward()
    loss = side.loss(outputs)
    side.backward(loss, retain_graph=True)
    side.backward(loss)
    return outputs


def asks(side: Side, when: str, of: str) -> list[torch.Tensor]:
    """`autograd.grad` in a step: of "loss" by all parameters or by one "layer".

    `when` is "before forward" (through the module itself), "before backward" (through the wrapper's output, whose
    backward then follows) or "instead" (another forward of the wrapper, whose backward does not follow).
    """
    side.zero()
    wanted = [param for param in side.model.parameters() if param.requires_grad]
    wanted = wanted[-2:-1] if of == "layer" else wanted
    asked: list[torch.Tensor | None] = []
    if when == "before forward":
        asked += torch.autograd.grad(
            side.loss(side.outputs_of(side.model(side.batch(1)))), wanted, allow_unused=True
        )
    if when == "instead":
        asked += torch.autograd.grad(side.loss(side.forward(1)), wanted, allow_unused=True)
    outputs = side.forward()
    loss = side.loss(outputs)
    if when == "before backward":
        asked += torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    side.backward(loss)
    return outputs + [grad for grad in asked if grad is not None]


def penalise(side: Side) -> list[torch.Tensor]:
    """A loss that contains the slope of the output by the input: `autograd.grad` with create_graph."""
    side.zero()
    batch = side.batch()
    batch.x.requires_grad_()
    output = side.ddp(batch)
    loss = side.loss(side.outputs_of(output))
    [slope] = torch.autograd.grad(loss, batch.x, create_graph=True)
    side.backward(loss + slope.square().sum())
    return [slope]


def hessian(side: Side, how: str) -> list[torch.Tensor]:
    """A Hessian-vector product by `autograd.grad`, "before" the backward; or gradients that the "loss" contains."""
    side.zero()
    outputs = side.forward()
    loss = side.loss(outputs)
    wanted = [param for param in side.model.parameters() if param.requires_grad]
    grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    norm = sum(grad.square().sum() for grad in grads if grad is not None and grad.requires_grad)
    if how == "loss":
        side.backward(loss + 1e-3 * norm)
        return outputs
    products = torch.autograd.grad(norm, wanted, retain_graph=True, allow_unused=True)
    side.backward(loss)
    return outputs + [product for product in products if product is not None]


def inside_checkpoint(side: Side, how: str, layer: int, inner: str) -> list[torch.Tensor]:
    """A step in which the wrapper's whole forward is in a checkpoint, "reentrant" or not, and so runs twice.

    Within it one layer is used as `inner` says, see `Use`.
    """
    side.zero()
    batch, before = side.batch(), side.model.route
    routes.checkpoint(side, layer, inner)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(side.outputs_of(side.ddp(replace(batch, x=x))))

    try:
        outputs = list(checkpoint(forward, batch.x.detach().requires_grad_(), use_reentrant=how == "reentrant"))
        side.backward(side.loss(outputs))
    finally:
        side.model.route = before
    return outputs


def create_graph(side: Side) -> list[torch.Tensor]:
    """Backward leaves gradients that are part of a graph; the script drops that graph before it goes on.

    Where gradients are views, torch's stay part of it: not compared, see also `verdict.py`.
    """
    side.zero()
    outputs = side.forward()
    side.backward(side.loss(outputs), create_graph=True)
    grads = [param.grad for param in side.named_params.values() if param.grad is not None]
    for param in side.named_params.values():
        if param.grad is not None:
            param.grad = param.grad.detach()
    return outputs + ([] if side.script.options.gradient_as_bucket_view else grads)


def two_forwards(side: Side, order: str) -> list[torch.Tensor]:
    """Two forwards; then their losses "summed", or a backward for each: "in order", "reversed"."""
    side.zero()
    outputs = [side.forward(nth) for nth in range(2)]
    losses = [side.loss(each) for each in outputs]
    if order == "summed":
        side.backward(losses[0] + losses[1])
    else:
        for loss in losses if order == "in order" else losses[::-1]:
            side.backward(loss)
    return outputs[0] + outputs[1]


def abandon(side: Side, under_no_sync: bool = False) -> list[torch.Tensor]:
    """A forward whose backward never comes."""
    with side.ddp.no_sync() if under_no_sync else contextlib.nullcontext():
        return side.forward()


def fail(side: Side, where: str, stop: int) -> None:
    """The "forward" or the "backward" of a step fails at a stop of the route, and the script goes on.

    Gradients are undefined then: what is on its way may land in them at any moment.
    """
    side.zero()
    _fails(side, where, stop)
    for param in side.named_params.values():
        param.grad = None


def _fails(side: Side, where: str, stop: int) -> bool:
    """A step without the optimizer's that fails at a stop of the route. True if it has."""
    side.model.fails_in, side.model.fails_at = where, stop % (len(side.model.route) + 1)
    try:
        side.loss(side.forward()).backward()
    except Interrupted:
        return True
    finally:
        side.model.fails_in = None
    return False


def fail_and_step(side: Side, stop: int, clears: bool, leaves_out: bool) -> None:
    """A backward fails, and the script steps the optimizer all the same, with or without clearing the gradients.

    With find_unused_parameters it may be one that leaves a layer out. Torch steps on gradients that are not
    averaged. minddp's must be refused, unless they have been cleared.
    """
    side.zero()
    before = side.model.route
    if leaves_out and side.script.options.find_unused_parameters:
        routes.drop(side, stop)
    # Not before the first stop: a nested backward may have reduced everything by then.
    failed = _fails(side, "backward", 1 + stop % max(1, len(side.model.route)))
    side.model.route = before
    if clears:
        for param in side.named_params.values():
            param.grad = None
    if failed and side.is_subject and side.overlapped is None:
        _step_after_failure(side, is_refused=not clears)
    for param in side.named_params.values():
        param.grad = None


def _step_after_failure(side: Side, *, is_refused: bool) -> None:
    try:
        side.optimizer.step()
    except RuntimeError as error:
        if not is_refused:
            raise AssertionError("the optimizer does not step, although there is no gradient") from error
    else:
        if is_refused:
            raise AssertionError("the optimizer has stepped on gradients that are not averaged")


def windows(side: Side, *lengths: int) -> list[torch.Tensor]:
    """Local steps under `no_sync`, then a synchronised one; so many for each length, one more on odd ranks."""
    outputs = []
    for window, length in enumerate(lengths):
        side.zero()
        with side.ddp.no_sync():
            for nth in range(length + side.rank % 2):
                side.loss(side.forward(10 * window + nth + 1)).backward()
        outputs += side.forward(10 * window)
        side.backward(side.loss(outputs[-1:]))
    return outputs


def backward_in_no_sync(side: Side) -> list[torch.Tensor]:
    """A forward outside of `no_sync`, with its backward inside."""
    side.zero()
    outputs = side.forward()
    with side.ddp.no_sync():
        side.backward(side.loss(outputs))
    return outputs


def local_step(side: Side) -> list[torch.Tensor]:
    """Forward and backward inside `no_sync`; the next step adds to these gradients."""
    side.zero()
    with side.ddp.no_sync():
        outputs = side.forward()
        side.loss(outputs).backward()
    side.keeps_grads_once = True
    return outputs


def weight_decay(side: Side, layer: int) -> list[torch.Tensor]:
    """The loss uses a layer's weights beside the forward."""
    side.zero()
    outputs = side.forward()
    side.backward(side.loss(outputs) + sum(param.square().sum() for param in side.params_of(layer)))
    return outputs


def backward_outside(side: Side, layer: int, when: str) -> list[torch.Tensor]:
    """A backward that reaches one weight alone: "before" the forward, "between" it and its backward, or "after"."""
    side.zero()

    def penalty() -> None:
        for param in side.params_of(layer)[:1]:
            param.square().sum().backward()

    if when == "before":
        penalty()
    outputs = side.forward()
    if when == "between":
        penalty()
    side.backward(side.loss(outputs))
    if when == "after":
        penalty()
    return outputs


def evaluate(side: Side, mode: str, when: str) -> list[torch.Tensor]:
    """A forward under "no_grad", "inference_mode" or "eval" alone; `when` is "before" a step or "within" it."""
    guard = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "eval": contextlib.nullcontext,
    }[mode]

    def forward() -> list[torch.Tensor]:
        side.ddp.eval()
        with guard():
            outputs = side.forward(1)
        side.ddp.train()
        return [output.detach().clone() for output in outputs]

    if when == "before":
        return forward() + side.train()
    side.zero()
    outputs = side.forward()
    seen = forward()
    side.backward(side.loss(outputs))
    return seen + outputs
