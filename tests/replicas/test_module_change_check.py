"""Altered modules: what is noticed, what is allowed, and what is not kept alive."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from minddp.replicas.module_change_check import ModuleChangeCheck


def model() -> nn.Sequential:
    """The first layer's weight is frozen."""
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    layers[0].weight.requires_grad_(False)
    return layers


def check_of(module: nn.Module, ignored: tuple[str, ...] = ()) -> ModuleChangeCheck:
    """As a wrapper makes it."""
    named = module.named_parameters()
    return ModuleChangeCheck(module, [p for name, p in named if p.requires_grad or name in ignored], ignored)


def _adds(module: nn.Module) -> None:
    module[3].extra = nn.Parameter(torch.ones(2))


STRAYS: dict[str, Callable[[nn.Module], object]] = {
    "`0.weight` did not require grad": lambda module: module.requires_grad_(True),
    "`0.bias` did not exist": lambda module: setattr(module[0], "bias", nn.Parameter(torch.ones(2))),
    "`3.extra` did not exist": _adds,
    "`5.child.weight` did not exist, `5.child.bias` did not exist": (
        lambda module: setattr(module[5], "child", nn.Linear(2, 2))
    ),
    "`7.weight` did not exist, `7.bias` did not exist": lambda module: setattr(module, "7", nn.Linear(2, 2)),
}


@pytest.mark.parametrize("checks_before", [0, 1, 2, 3])
@pytest.mark.parametrize("stray", STRAYS)
def test_a_parameter_that_is_not_reduced_is_named_at_once(stray: str, checks_before: int) -> None:
    module = model()
    check = check_of(module)
    for _ in range(checks_before):
        check.check(module)
    STRAYS[stray](module)
    with pytest.raises(RuntimeError, match=f"not reduced: {re.escape(stray)} when the module"):
        check.check(module)


def test_frozen_layers_may_be_added_and_are_checked_from_then_on() -> None:
    module = model()
    check = check_of(module)
    module[7] = nn.Linear(2, 2).requires_grad_(False)
    check.check(module)
    module[7].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"`7\.weight` did not exist"):
        check.check(module)


def test_parameters_may_be_removed_moved_or_frozen() -> None:
    module = model()
    check = check_of(module)
    del module[6]
    module[1].bias = None
    module[2].weight.requires_grad_(False)
    module[3], module[4] = module[4], module[3]
    module[5].weight, module[5].second = module[4].weight, module[3].weight
    module.again = module[0]
    module.append(nn.ReLU())
    for _ in range(3):
        check.check(module)


def test_another_module_is_checked_at_once() -> None:
    module = model()
    check = check_of(module)
    wraps = nn.Sequential(module)  # as torch.compile does
    for _ in range(5):
        check.check(wraps)
    wraps.append(nn.Linear(2, 2, bias=False))
    with pytest.raises(RuntimeError, match=r"`1\.weight` did not exist"):
        check.check(wraps)
    with pytest.raises(RuntimeError, match=r"`1\.weight` did not exist"):
        check.check(nn.Sequential(module, nn.Linear(2, 2, bias=False)))


def test_what_is_ignored_by_name_may_be_replaced() -> None:
    module = model()
    check = check_of(module, ignored=("0.weight", "1.bias"))
    module[0].weight = nn.Parameter(torch.ones(2, 2))
    module[1].bias = nn.Parameter(torch.ones(2))
    for _ in range(3):
        check.check(module)


def test_tensors_may_replace_parameters_in_functional_call() -> None:
    """As in `torch.func.functional_call`, whose tensors may require grad."""
    module = model()
    check = check_of(module)
    wraps = nn.Module()
    wraps.module = module
    wraps.forward = lambda: [check.check(module) for _ in range(3)]  # type: ignore[method-assign]
    fast = {f"module.{name}": param * 0.9 for name, param in module.named_parameters()}
    torch.func.functional_call(wraps, fast, ())
    references = [weakref.ref(tensor) for tensor in fast.values()]
    del fast
    assert [reference() for reference in references] == [None] * len(references)  # nor the graph behind them
    check.check(module)
    _adds(module)
    with pytest.raises(RuntimeError, match=r"`3\.extra`"):
        check.check(module)


def test_parameters_are_identified_by_the_object_and_not_by_a_reused_address() -> None:
    """A parameter that is gone and a new one at its address are two parameters."""
    module = model()
    check = check_of(module)
    for _ in range(20):
        del module[0].bias
        module[0].bias = nn.Parameter(torch.ones(2))
        with pytest.raises(RuntimeError, match=r"`0\.bias` did not exist"):
            check.check(module)
