"""Altered modules: what is noticed, what is allowed, and what is not kept alive."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from minddp.replicas.module_change_check import FEW, ModuleChangeCheck


def model() -> nn.Sequential:
    """More submodules than two checks look at; the first layer's weight is frozen."""
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2 * FEW)))
    layers[0].weight.requires_grad_(False)
    return layers


def check_of(module: nn.Module, ignored: tuple[str, ...] = ()) -> ModuleChangeCheck:
    """As a wrapper makes it; past the first two checks, which look at everything."""
    named = module.named_parameters()
    check = ModuleChangeCheck(module, [p for name, p in named if p.requires_grad or name in ignored], ignored)
    for _ in range(2):
        check.check(module)
    return check


def check_all(check: ModuleChangeCheck) -> None:
    for _ in range(3):  # 2 * FEW + 1 submodules
        check.check(check._module)


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


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("stray", STRAYS)
def test_a_parameter_that_is_not_reduced_is_named(stray: str, everywhere: bool) -> None:
    module = model()
    check = check_of(module)
    check_all(check)
    STRAYS[stray](module)
    with pytest.raises(RuntimeError, match=f"not reduced: {re.escape(stray)} when the module"):
        check.check(module, everywhere=True) if everywhere else check_all(check)


@pytest.mark.parametrize("stray", STRAYS)
def test_the_first_two_checks_look_at_everything(stray: str) -> None:
    for checks_before in (0, 1):
        module = model()
        check = ModuleChangeCheck(module, [param for param in module.parameters() if param.requires_grad])
        for _ in range(checks_before):
            check.check(module)
        STRAYS[stray](module)
        with pytest.raises(RuntimeError, match="not reduced"):
            check.check(module)


def test_frozen_layers_may_be_added_and_are_checked_from_then_on() -> None:
    module = model()
    check = check_of(module)
    module[7] = nn.Linear(2, 2).requires_grad_(False)
    check_all(check)
    module[7].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"`7\.weight` did not exist"):
        check_all(check)


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
        check_all(check)


def test_another_module_is_checked_at_once() -> None:
    module = model()
    check = check_of(module)
    wraps = nn.Sequential(module)  # as torch.compile does
    for _ in range(5):
        check.check(wraps)
    wraps.append(nn.Linear(2, 2, bias=False))
    with pytest.raises(RuntimeError, match=r"`1\.weight` did not exist"):
        for _ in range(3):
            check.check(wraps)
    with pytest.raises(RuntimeError, match=r"`1\.weight` did not exist"):
        check.check(nn.Sequential(module, nn.Linear(2, 2, bias=False)))


def test_what_is_ignored_by_name_may_be_replaced() -> None:
    module = model()
    check = check_of(module, ignored=("0.weight", "1.bias"))
    module[0].weight = nn.Parameter(torch.ones(2, 2))
    module[1].bias = nn.Parameter(torch.ones(2))
    for _ in range(3):
        check_all(check)


def test_tensors_may_replace_parameters_in_functional_call() -> None:
    """As in `torch.func.functional_call`, whose tensors may require grad."""
    module = model()
    check = check_of(module)
    wraps = nn.Module()
    wraps.module = module
    wraps.forward = lambda: [check_all(check) for _ in range(3)]  # type: ignore[method-assign]
    fast = {f"module.{name}": param * 0.9 for name, param in module.named_parameters()}
    torch.func.functional_call(wraps, fast, ())
    references = [weakref.ref(tensor) for tensor in fast.values()]
    del fast
    assert [reference() for reference in references] == [None] * len(references)  # nor the graph behind them
    check_all(check)
    _adds(module)
    with pytest.raises(RuntimeError, match=r"`3\.extra`"):
        check_all(check)


def test_parameters_are_identified_by_the_object_and_not_by_a_reused_address() -> None:
    """A parameter that is gone and a new one at its address are two parameters."""
    module = model()
    check = check_of(module)
    for _ in range(20):
        del module[0].bias
        module[0].bias = nn.Parameter(torch.ones(2))
        with pytest.raises(RuntimeError, match=r"`0\.bias` did not exist"):
            check_all(check)
