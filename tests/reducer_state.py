"""The state of a reducer, checked after each of its transitions, and all combinations that tests have seen.

`StateWatch` wraps the methods of `Reducer` through which its state changes. After each one, also after one that
raises, a pass must exist unless the phase is IDLE, and must have come as far as its phase says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from minddp.core.backward_pass import Phase
from minddp.core.reducer import Reducer

TRANSITIONS = (
    "arm",
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
)


class ReducerState(NamedTuple):
    """What a reducer's next action may depend on. A field is False where its phase leaves no choice.

    Not whether buckets have memory: they are made when they are asked for.
    """

    phase: Phase
    finalizes_at_end: bool
    end_is_awaited: bool
    is_recording: bool
    awaits_order: bool

    @classmethod
    def of(cls, reducer: Reducer) -> ReducerState:
        current = reducer.current
        is_open = current is not None and current.phase in (Phase.ACCUMULATING, Phase.REDUCING)
        return cls(
            phase=reducer.phase,
            finalizes_at_end=reducer.phase is Phase.REDUCING and current.finalizes_at_end,
            end_is_awaited=is_open and current.ends.is_any_awaited(),
            is_recording=reducer.expectation.is_recording and reducer.phase is Phase.ACCUMULATING,
            awaits_order=reducer.phase is Phase.FINALIZING and reducer.awaits_order,
        )


class StateWatch:
    """Checks every transition of every reducer; `seen` are the combinations of state so far."""

    def __init__(self) -> None:
        self.seen: set[ReducerState] = set()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch every reducer until `monkeypatch` is undone."""
        for name in TRANSITIONS:
            monkeypatch.setattr(Reducer, name, self._watching(getattr(Reducer, name)))
        enter = Reducer._enter

        def enter_and_check(reducer: Reducer, phase: Phase) -> None:
            enter(reducer, phase)
            check_pass(reducer)

        monkeypatch.setattr(Reducer, "_enter", enter_and_check)

    def _watching(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def transition(reducer: Reducer, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(reducer, *args, **kwargs)
            finally:
                check_pass(reducer)
                self.seen.add(ReducerState.of(reducer))

        return transition


def check_pass(reducer: Reducer) -> None:
    current = reducer.current
    if current is None:
        return
    assert current.phase is not Phase.IDLE, "a pass in phase IDLE has been kept"
    if current.phase is Phase.ARMED:
        assert not current.hooks_left, "a pass that is armed has counted a hook"
    if current.phase in (Phase.REDUCING, Phase.FINALIZING, Phase.FINISHED):
        assert len(current.reductions) == len(current.groups_left), f"{current.phase.name} before all are launched"
