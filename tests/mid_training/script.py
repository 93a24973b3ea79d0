"""A script: a model, options of DDP and lines of training, all of it plain data that prints as Python."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tests.mid_training.changes import CHANGES
from tests.parity.scenario import Options

TRANSPORTS = ("process_group", "shared_memory", "hierarchical")


@dataclass(frozen=True, repr=False)
class Line:
    """One line of a script: the change called `name`, with its arguments. It prints as a call."""

    name: str
    args: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.args))})"


@dataclass(frozen=True, repr=False)
class Script:
    """What both wrappers play, on every rank alike.

    `layers` are keys of `network.LAYERS`. `calm_steps` ordinary steps come before `lines`. After an error the
    script ends, unless it `goes_on`. `accelerated` is False where minddp's accelerations are switched off.
    `in_double`: minddp computes in float64, by its `mixed_precision`. Torch's is wrong in its first steps, so the
    control is torch without it, and results are equal but for rounding.
    """

    seed: int
    world_size: int
    transport: str
    layers: tuple[str, ...]
    options: Options
    calm_steps: int = 4
    lines: tuple[Line, ...] = ()
    goes_on: bool = False
    accelerated: bool = True
    in_double: bool = False

    def program(self) -> tuple[Line, ...]:
        """All lines, the calm ones included."""
        return (Line("train"),) * self.calm_steps + self.lines

    def __repr__(self) -> str:
        head = [f"seed={self.seed}", f"world_size={self.world_size}", f"transport={self.transport!r}"]
        head += [f"layers={self.layers!r}", f"options={self.options!r}"]
        head += [
            f"{name}={getattr(self, name)!r}"
            for name in ("calm_steps", "goes_on", "accelerated", "in_double")
            if getattr(self, name) != getattr(type(self), name)
        ]
        lines = "".join(f"        {line!r},\n" for line in self.lines)
        return f"Script({', '.join(head)},\n    lines=(\n{lines}    ))"

    @classmethod
    def parsed(cls, text: str) -> Script:
        """The script that prints as `text`."""
        names: dict[str, Any] = {name: partial(_line, name) for name in CHANGES}
        return eval(text, names | {"Script": cls, "Options": Options})

    def without_line(self, index: int) -> Script:
        return replace(self, lines=self.lines[:index] + self.lines[index + 1 :])


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
