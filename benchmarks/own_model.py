"""A model of the user's own, named on the command line: `file.py:make` or `package.module:make`.

`make()` is called on every rank, in the process group, and returns a module and a function `loss(model)`, which has
its batch already: that of the rank, if it asks `torch.distributed.get_rank()`, or a random one, since seeds differ.
If `make` has a parameter `parts`, it makes a batch of `1 / parts` of the size: strong scaling needs that.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import gathered
from benchmarks.question import ModelError
from benchmarks.workloads import Workload

TURN_S = 0.1  # a turn has so many steps that it takes about this long


def own_workload(spec: str, parts: int = 1) -> Workload:
    """The workload of `make` in `spec`, checked by one step on this rank. Collective.

    Raises:
        ModelError: there is no such function, or its model cannot be trained.
    """
    torch.manual_seed(1000 + dist.get_rank())  # other data on each rank; the weights become those of rank 0
    make = imported(spec)
    made = make(parts=parts) if has_parts(make) else make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ModelError(f"{spec} returned a {type(made).__name__}; return (module, loss), loss a function.")
    model, loss = made
    return Workload(
        Path(spec).name,
        spec.replace("\\", "/").rpartition("/")[2],
        lambda: model,
        batch=lambda rng: (torch.empty(1), torch.empty(1)),
        loss=lambda output, target: output,
        learning_rate=1e-4,
        steps_per_turn=max(1, min(8, int(TURN_S / max(gathered(seconds_of_step(spec, model, loss)))))),
        has_sparse_gradients=any(getattr(part, "sparse", False) for part in model.modules()),
        own_loss=loss,
    )


def imported(spec: str) -> Callable[..., Any]:
    """The function that `spec` names."""
    place, _, name = spec.rpartition(":")
    try:
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise ModelError(f"There is no file {place}; give --model file.py:make or package.module:make.")
            sys.path.insert(0, str(Path(place).resolve().parent))
        return getattr(importlib.import_module(Path(place).stem if place.endswith(".py") else place), name)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ModelError(
            f"{spec!r} cannot be imported: {error}. Give file.py:make or package.module:make."
        ) from error


def has_parts(make: Callable[..., Any]) -> bool:
    return "parts" in inspect.signature(make).parameters


def seconds_of_step(spec: str, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> float:
    """The second of two forward and backward passes of a copy. Raises ModelError if it cannot be trained."""
    taken = copy.deepcopy(model)
    for _ in range(2):
        start = time.perf_counter()
        taken.zero_grad(set_to_none=True)
        value = loss(taken)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ModelError(f"loss(model) of {spec} returned a {type(value).__name__}; return one number.")
        if not torch.isfinite(value).all():
            raise ModelError(f"loss(model) of {spec} is {value.item()} at the first step; it must be finite.")
        if value.requires_grad:
            value.backward()
        seconds = time.perf_counter() - start
    grads = {name: param.grad for name, param in taken.named_parameters() if param.grad is not None}
    if not grads:
        raise ModelError(f"loss(model) of {spec} gives no parameter a gradient: compute it from its argument.")
    return seconds
