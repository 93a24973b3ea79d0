"""Every test of the core checks the state of reducers after each transition: is a pass as far as its phase says?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minddp.core.backward_pass import Phase
from minddp.core.reducer import Reducer

TRANSITIONS = (
    "prepare_for_backward",
    "ensure_finished",
    "rebuild_if_due",
    "reduce_recorded",
    "finish",
    "change_ranks",
    "expect",
    "adopt",
    "_on_hook",
    "_on_all_launched",
    "_on_gradient_enters",
    "_on_backward_end",
    "_enter",
)


@pytest.fixture(autouse=True)
def state_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every reducer, also after a transition that raises. Each test draws the same numbers."""
    torch.manual_seed(0)
    for name in TRANSITIONS:
        monkeypatch.setattr(Reducer, name, _checked(getattr(Reducer, name)))


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def transition(reducer: Reducer, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(reducer, *args, **kwargs)
        finally:
            check_pass(reducer)

    return transition


def check_pass(reducer: Reducer) -> None:
    current = reducer.current
    if current is None:
        return
    assert current.phase is not Phase.IDLE, "a pass in phase IDLE has been kept"
    if current.phase is Phase.PREPARED:
        assert not current.hooks_left, "a pass that is armed has counted a hook"
    if current.phase in (Phase.REDUCING, Phase.FINALIZING, Phase.FINISHED):
        assert len(current.reductions) == len(current.groups_left), f"{current.phase.name} before all are launched"
