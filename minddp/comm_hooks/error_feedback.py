"""The rounding error that a hook has not sent yet, which it adds to the gradient of the next step (error feedback).

Seide et al., "1-Bit Stochastic Gradient Descent", 2014, section 3. Training then converges as without rounding:
Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, arXiv 1901.09847.

As in torch's PowerSGD, an error is kept when its bucket has been rounded, even if the step is not taken after all
(an exception in backward, or a step that a GradScaler skips): load the `state_dict` from before it to undo that.
After a change of a GradScaler's scale the errors keep the old one. Under `no_sync` no hook runs: the errors stay.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minddp.comm_hooks.hook_collectives import HookCollectives


class ErrorFeedback(HookCollectives):
    """The collectives of a hook, with this rank's errors, in float32, for each parameter of `module`."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__(module, group)
        self._params = dict(module.named_parameters())
        self._errors: dict[torch.Tensor, torch.Tensor] = {}  # by parameter

    def errors_of(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The errors to add to the gradients of `params`. To be called in a job, like `keep`."""
        return [self._errors.get(param, torch.zeros_like(param, dtype=torch.float32)) for param in params]

    def keep(self, params: Sequence[torch.Tensor], errors: Sequence[torch.Tensor]) -> None:
        """Keep the new errors, without NaN and infinity, which would spoil all later steps."""
        self._errors |= zip(params, (error.nan_to_num(0.0, 0.0, 0.0) for error in errors), strict=True)

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors by name. Each rank saves its own, between steps."""
        self.drain()
        errors = {name: self._errors[param] for name, param in self._params.items() if param in self._errors}
        return {"rank": self.rank, "num_ranks": self.size, "errors": errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: another rank saved them, or another number of ranks, or they belong to other parameters.
        """
        shapes = {name: param.shape for name, param in self._params.items()}
        wrong = [name for name, error in state["errors"].items() if shapes.get(name) != error.shape]
        if wrong or (state["rank"], state["num_ranks"]) != (self.rank, self.size):
            raise ValueError(
                f"The errors were saved by rank {state['rank']} of {state['num_ranks']}, but this is rank "
                f"{self.rank} of {self.size}. Parameters of another shape here: {', '.join(wrong) or 'none'}. Load "
                f"the errors that this rank saved, for the same model; on another number of ranks, load none."
            )
        self.drain()
        by_name = self._params
        self._errors = {by_name[name]: error.to(by_name[name].device) for name, error in state["errors"].items()}
