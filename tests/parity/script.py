"""A script: a model, options of DDP and lines of training, all of it plain data that prints as Python."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP

TRANSPORTS = ("process_group", "shared_memory", "hierarchical")
DEVICE = "cpu"  # tests/gpu moves what is made on the CPU elsewhere


class PrintsWhatDiffers:
    """A dataclass's repr without the fields that hold their default."""

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        shown = [
            f"{name}={value!r}"
            for name, value in values.items()
            if defaults[name] is MISSING or value != defaults[name]
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Options(PrintsWhatDiffers):
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


@dataclass(frozen=True, repr=False)
class Line:
    """One line of a script: the change called `name`, with its arguments. It prints as a call."""

    name: str
    args: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.args))})"


@dataclass(frozen=True, repr=False)
class Script(PrintsWhatDiffers):
    """The lines that both wrappers play, on every rank alike, and all that the ranks need for them.

    `layers` are those of `network.LAYERS`. With `apart` every rank starts from weights of its own. `calm_steps`
    ordinary steps come before `lines`. After an error the script ends, unless it `goes_on`. `accelerated` is False
    where minddp's accelerations are switched off. `in_double`: minddp computes in float64, by its
    `mixed_precision`. Torch's is wrong in its first steps, so it computes without it, and results are equal but for
    rounding.
    """

    layers: tuple[str, ...]
    options: Options = Options()
    lines: tuple[Line, ...] = ()
    seed: int = 0
    world_size: int = 2
    transport: str = "process_group"
    calm_steps: int = 0
    apart: bool = False
    goes_on: bool = False
    accelerated: bool = True
    in_double: bool = False

    def program(self) -> tuple[Line, ...]:
        """All lines, the calm ones included."""
        return (Line("train"),) * self.calm_steps + self.lines

    @classmethod
    def parsed(cls, text: str) -> Script:
        """The script that prints as `text`."""
        from tests.parity.changes import CHANGES

        names: dict[str, Any] = {name: partial(_line, name) for name in CHANGES}
        return eval(text, names | {"Script": cls, "Options": Options})


def _line(name: str, *args: Any) -> Line:
    return Line(name, args)


@contextlib.contextmanager
def acceleration_of(script: Script) -> Iterator[None]:
    """The environment in which the ranks play the script."""
    before = os.environ.get("MINDDP_ACCELERATION")
    if not script.accelerated:
        os.environ["MINDDP_ACCELERATION"] = "off"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("MINDDP_ACCELERATION", None)
        else:
            os.environ["MINDDP_ACCELERATION"] = before
