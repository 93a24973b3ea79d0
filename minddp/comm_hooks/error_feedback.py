"""What rounding has kept from being sent: added to the gradient of the next step (error feedback).

Seide et al., "1-Bit Stochastic Gradient Descent", 2014, section 3; why training then converges as without rounding:
Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, arXiv 1901.09847.

[Note: errors of a backward that counts]
What a hook has not sent becomes valid when the backward has ended. After an exception its averages are dropped, and
so are the errors that belong to them: the next backward begins with those that were there before. In `no_sync` no
hook runs, and the errors wait. A joined rank (`join`) has hooks run outside of any backward, on zeros: its errors
are sent and are valid at once. Of a parameter that no rank has used, the average is dropped, and with it the error.
A GradScaler is not known here: when its scale changes, the error has that of the step before.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from minddp.comm_hooks.exchange import Exchange, Job
from minddp.core import autograd


class ErrorFeedback(Exchange):
    """An exchange with this rank's errors, in float32, by parameter of `module`, whatever its bucket."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__(module, group)
        self._params = dict(module.named_parameters())
        self._errors: dict[torch.Tensor, torch.Tensor] = {}
        self._next: dict[torch.Tensor, torch.Tensor] = {}  # of the backward that is running
        self._backward = -1

    def run(self, buffer: torch.Tensor, job: Job) -> torch.futures.Future[torch.Tensor]:
        """As `Exchange.run`, in a hook. See [Note: errors of a backward that counts]."""
        backward = autograd.current_backward()
        if backward != self._backward:
            self._backward = backward
            self.enqueue(self._next.clear)
            if backward >= 0:
                autograd.call_at_end_of_backward(lambda: self.enqueue(self._commit))
        future = super().run(buffer, job)
        if backward < 0:
            self.enqueue(self._commit)
        return future

    def errors_of(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """To be added to the gradients; in a job, as `keep`."""
        return [self._errors.get(param, torch.zeros_like(param, dtype=torch.float32)) for param in params]

    def keep(self, params: Sequence[torch.Tensor], errors: Sequence[torch.Tensor]) -> None:
        """What was not sent this time. NaN and infinity are not kept: they would be in all later steps."""
        self._next |= zip(params, (error.nan_to_num(0.0, 0.0, 0.0) for error in errors), strict=True)

    def _commit(self) -> None:
        self._errors |= self._next
        self._next.clear()

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors, to be saved on each rank for itself, between steps."""
        Exchange.run(self, torch.empty(0), lambda: None).wait()  # and so for the jobs before it
        errors = {name: self._errors[param] for name, param in self._params.items() if param in self._errors}
        return {"rank": self.rank, "num_ranks": self.size, "errors": errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: saved by another rank, among another number of ranks, or for other parameters.
        """
        shapes = {name: param.shape for name, param in self._params.items()}
        wrong = [name for name, error in state["errors"].items() if shapes.get(name) != error.shape]
        if wrong or (state["rank"], state["num_ranks"]) != (self.rank, self.size):
            raise ValueError(
                f"The errors are those of rank {state['rank']} of {state['num_ranks']}, but this is rank "
                f"{self.rank} of {self.size}; of other shape here: {', '.join(wrong) or 'none'}. Load each rank's "
                f"own, for the same model; with more or fewer ranks, load none."
            )
        Exchange.run(self, torch.empty(0), lambda: None).wait()  # and so for the jobs before it
        by_name = self._params
        self._errors = {by_name[name]: error.to(by_name[name].device) for name, error in state["errors"].items()}
