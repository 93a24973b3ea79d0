"""When a backward ends and some parameters have no gradient: say which, as early as it is certain.

[Note: unfinished reduction]
A backward that leaves parameters out is not an error yet: a second backward through another output may bring
the rest. It becomes one when somebody relies on the result. Torch notices at the next forward, one iteration
too late: the optimizer has then already stepped with gradients that were not reduced, and the ranks have
parted. minddp arms a guard on the optimizers as soon as a backward ends unfinished; a step that would touch one
of the module's parameters raises first. The next forward raises too, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_FACT = "Expected to have finished reduction in the prior iteration before starting a new one. "
_OUTPUTS = "by making sure all `forward` function outputs participate in calculating loss"


def unfinished_reduction(
    rank: int,
    missing: Sequence[int],
    names: Sequence[str],
    *,
    static_graph: bool,
    finds_unused: bool,
) -> RuntimeError:
    """The error for a reduction that lacks the gradients of the parameters `missing` (indices)."""
    if static_graph:
        why = (
            "This error indicates that your training graph has changed in this iteration, e.g., one parameter "
            "is used in first iteration, but then got unused in the second iteration. this is not compatible "
            "with static_graph set to True. Pass static_graph=False"
        )
    elif finds_unused:
        why = (
            "This error indicates that your module has parameters that were not used in producing loss. Since "
            "`find_unused_parameters=True` is enabled, this likely  means that not all `forward` outputs "
            f"participate in computing loss. You can fix this {_OUTPUTS}"
        )
    else:
        why = (
            "This error indicates that your module has parameters that were not used in producing loss. You "
            "can enable unused parameter detection by passing the keyword argument "
            f"`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and {_OUTPUTS}"
        )
    return RuntimeError(
        f"{_FACT}{why}.\n"
        f"Parameters which did not receive grad for rank {rank}: {', '.join(names[i] for i in missing)}\n"
        f"Parameter indices which did not receive grad for rank {rank}: {' '.join(map(str, missing))}\n"
        f"The other buckets of this backward are reduced but not in `.grad`, which holds rank {rank}'s own "
        f"gradients; a rank whose gradients were complete waits for this one."
    )


def ready_twice(index: int, name: str, *, static_graph: bool) -> RuntimeError:
    """The error for a parameter whose hook fired more often in one backward than it should."""
    if static_graph:
        return RuntimeError(
            f"Your training graph has changed in this iteration, e.g., one parameter is unused in first "
            f"iteration, but then got used in the second iteration. this is not compatible with static_graph "
            f"set to True. The parameter is `{name}` (index {index}); pass static_graph=False."
        )
    return RuntimeError(
        f"Expected to mark a variable ready only once. Parameter at index {index} with name {name} has been "
        f"marked as ready twice: its gradient was accumulated more than once in this backward. That happens "
        f"when it is used outside `forward`, when several reentrant `checkpoint` calls share it, or when it "
        f"was found unused and then used in a nested backward. Use checkpoint(..., use_reentrant=False), or "
        f"static_graph=True if every iteration has the same graph."
    )


class OptimizerGuard:
    """While it is up, an optimizer that is about to step on one of `params` meets `error()` instead.

    See [Note: unfinished reduction].
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], error: Callable[[], Exception]):
        ours = {id(param) for param in params}

        def before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            if any(id(param) in ours for group in optimizer.param_groups for param in group["params"]):
                raise error()

        self._handle = register_optimizer_step_pre_hook(before_step)

    def lift(self) -> None:
        self._handle.remove()
