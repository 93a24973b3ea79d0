"""Step each bucket's parameters as soon as their averages are there, while later buckets are still in flight.

Most optimizers treat each parameter by itself, so the bits are those of `optimizer.step()` after backward. Steps
that need all gradients at once, such as clipping by the norm or loss scaling, cannot be overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from minddp.core.bucket import Bucket
from minddp.core.mode import Mode


class OverlappedOptimizer(Mode):
    """Steps an optimizer bucket by bucket, with the optimizer's own state and hyperparameters.

    `params` are the parameters of `module` that have a bucket.

    Raises:
        ValueError: the optimizer evaluates the model (LBFGS), or has trainable parameters without a bucket.
    """

    why_not_twice = "the overlapped optimizer would use it twice. Compute one loss from all outputs"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        modes: list[Mode],
    ):
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates the model in its step, so it cannot be stepped in backward.")
        self._optimizer = optimizer
        self._module = module
        self._params = {id(param): param for param in params}
        self._modes = modes
        self.post_forward()
        modes.append(self)
        self._guard = optimizer.register_step_pre_hook(_refuse)

    def post_forward(self) -> None:
        """Refuse parameters without a bucket; groups may have been added since the last forward."""
        stepped = [param for group in self._optimizer.param_groups for param in group["params"]]
        if left := [param for param in stepped if param.requires_grad and id(param) not in self._params]:
            names = {id(param): f"`{name}`" for name, param in self._module.named_parameters()}
            listed = [names.get(id(param), f"a parameter of shape {tuple(param.shape)}") for param in left]
            raise ValueError(
                f"`overlap_optimizer` steps the parameters of each bucket. These have no bucket, so they would "
                f"never be stepped: {', '.join(listed)}. Give them an optimizer of their own."
            )

    def after_unpack(self, bucket: Bucket) -> None:
        """Step the parameters that the bucket and the optimizer have in common."""
        chosen = set(bucket.params)
        wholes = self._optimizer.param_groups
        groups = [{**whole, "params": [param for param in whole["params"] if param in chosen]} for whole in wholes]
        if stepped := [group for group in groups if group["params"]]:
            piece = object.__new__(type(self._optimizer))  # shares all attributes, some of which copy.copy drops
            hooks: dict[str, Any] = {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}
            vars(piece).update(vars(self._optimizer), param_groups=stepped, **hooks)
            type(piece).step(piece)
        for whole, group in zip(wholes, groups, strict=True):
            if changed := [name for name in whole if name != "params" and group[name] is not whole[name]]:
                raise RuntimeError(
                    f"The step changes {changed} of a group. Step this optimizer after backward, not by buckets."
                )

    def remove(self) -> None:
        """Stop stepping in backward, and allow `optimizer.step()` again."""
        self._guard.remove()
        if self in self._modes:
            self._modes.remove(self)


def _refuse(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    raise RuntimeError(
        f"This {type(optimizer).__name__} has been given to `overlap_optimizer`: backward has already stepped its "
        f"parameters. Leave out `optimizer.step()`, or undo the overlap by the handle's `remove()`."
    )
