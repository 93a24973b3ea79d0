"""A scenario: a small random model, options of DDP and a script of training steps, all of it plain data.

Scenarios are frozen, picklable and print as the Python expression that makes them again, so that a failing
example can be read, sent to worker processes, and replayed:

    python -m tests.parity.replay "Scenario(world_size=3, ...)"
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, dataclass, fields
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP


class _PrintsWhatDiffers:
    """A dataclass's repr without the fields that hold their default; those without default come by position."""

    def __repr__(self) -> str:
        shown = []
        for spec in fields(self):  # type: ignore[arg-type]
            value = getattr(self, spec.name)
            if spec.default is MISSING:
                shown.append(repr(value))
            elif value != spec.default:
                shown.append(f"{spec.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Layer(_PrintsWhatDiffers):
    """One block of the model.

    `kind` is a key of `models.LAYERS`; `dtype` is that of its parameters ("float32", "float64", "bfloat16");
    `frozen` says which of its parameters need no gradient: "none", "first" or "all".
    """

    kind: str
    dtype: str = "float32"
    frozen: str = "none"


@dataclass(frozen=True, repr=False)
class Model(_PrintsWhatDiffers):
    """The model: blocks in a row, and one or two heads.

    `reversed_use` runs the blocks in the opposite order of their registration, so that gradients do not
    become ready in the order that DDP first guesses. `output` is what forward returns ("tensor", "tuple",
    "dict" or "dataclass"); all but the first have a second head, and the loss reads it if `loss_uses` is "all",
    not if it is "main". With `weights_per_rank` every rank starts from weights of its own.
    """

    layers: tuple[Layer, ...]
    reversed_use: bool = False
    output: str = "tensor"
    loss_uses: str = "all"
    weights_per_rank: bool = True


@dataclass(frozen=True, repr=False)
class Options(_PrintsWhatDiffers):
    """Arguments of the DDP constructor; the defaults are torch's."""

    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: tuple[float, ...] | None = None
    gradient_as_bucket_view: bool = False
    batched_grad_copy: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False
    broadcast_buffers: bool | None = None
    forward_sync_buffers: bool | None = None
    init_sync: bool = True

    @classmethod
    def offered(cls) -> list[str]:
        """Names of the options that the installed torch has; older ones lack the newest."""
        known = inspect.signature(TorchDDP).parameters
        return [option.name for option in fields(cls) if option.name in known]

    def chosen(self) -> dict[str, Any]:
        """The arguments that differ from the default, as keywords."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if self.bucket_cap_mb_list is not None:
            chosen["bucket_cap_mb_list"] = list(self.bucket_cap_mb_list)
        return chosen


class Step(_PrintsWhatDiffers):
    """One line of the script. All ranks perform the same steps."""


@dataclass(frozen=True, repr=False)
class Train(Step):
    """Forward and backward with gradients averaged over the ranks.

    `forwards` forwards come first; then one backward of the sum of their losses, or one backward for each
    if `separate`. With `again` backward runs a second time through the same graph.
    """

    forwards: int = 1
    separate: bool = False
    again: bool = False


@dataclass(frozen=True, repr=False)
class Accumulate(Step):
    """Forward and backward under `no_sync`, `batches` times; with `backward_only` the forward is outside."""

    batches: int = 1
    backward_only: bool = False


@dataclass(frozen=True, repr=False)
class Abandon(Step):
    """A forward whose output is dropped: no backward follows. With `under_no_sync` inside `no_sync`."""

    under_no_sync: bool = False


@dataclass(frozen=True, repr=False)
class ZeroGrad(Step):
    set_to_none: bool = True


@dataclass(frozen=True, repr=False)
class Optimize(Step):
    """A step of SGD with momentum."""


@dataclass(frozen=True, repr=False)
class Evaluate(Step):
    """A forward in evaluation mode, under `torch.no_grad` or not; then back to training mode."""

    no_grad: bool = True


@dataclass(frozen=True, repr=False)
class Interrupt(Step):
    """A backward that an exception ends after `depth` blocks, then `zero_grad(set_to_none=True)`."""

    depth: int = 1


@dataclass(frozen=True, repr=False)
class LoadState(Step):
    """A round trip through `state_dict`: every floating-point value halved, then loaded again."""


@dataclass(frozen=True, repr=False)
class Pickle(Step):
    """The wrapper is pickled, with the module in it, and the copy takes its place."""


@dataclass(frozen=True, repr=False)
class Scenario(_PrintsWhatDiffers):
    """All that the ranks need.

    `hook` is a key of `hooks.HOOKS` or None. With `keeps_gradients` the script keeps the gradients of each
    step until the next is done, as a logger might; torch never changes a gradient that is no longer `.grad`.
    """

    world_size: int
    model: Model
    options: Options = Options()
    hook: str | None = None
    script: tuple[Step, ...] = ()
    keeps_gradients: bool = False
    seed: int = 0
