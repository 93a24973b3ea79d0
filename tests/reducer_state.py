"""The state of a reducer, checked after each of its transitions, and all combinations that tests have seen.

`StateWatch` wraps the methods of `Reducer` through which its state changes. After each one, also after one that
raises, a pass must exist in exactly the phases `WITH_PASS`, and a guard in exactly `WITH_GUARD`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from minddp.core.backward_pass import WITH_GUARD, WITH_PASS, Phase
from minddp.core.optimizer_steps import _watchers
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
    has_pass: bool
    has_guard: bool
    all_launched: bool
    finalizes_at_end: bool
    end_is_awaited: bool
    has_rebuilt: bool
    order_is_observed: bool
    is_recording: bool
    order_is_provisional: bool

    @classmethod
    def of(cls, reducer: Reducer) -> ReducerState:
        return cls(
            phase=reducer.phase,
            has_pass=reducer.current is not None,
            has_guard=id(reducer.unfinished) in _watchers(),
            all_launched=reducer.current is not None and reducer.current.all_launched,
            finalizes_at_end=reducer.phase is not Phase.IDLE and reducer._finalizes_at_end,
            end_is_awaited=reducer.backward_end.is_awaited,
            has_rebuilt=reducer.store.has_rebuilt,
            order_is_observed=reducer.store._observed_order is not None,
            is_recording=reducer.expectation.is_recording,
            order_is_provisional=reducer.expectation.order_is_provisional,
        )


class StateWatch:
    """Checks every transition of every reducer; `seen` are the combinations of state so far."""

    def __init__(self) -> None:
        self.seen: set[ReducerState] = set()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch every reducer until `monkeypatch` is undone."""
        for name in TRANSITIONS:
            monkeypatch.setattr(Reducer, name, self._watching(getattr(Reducer, name)))
        set_phase = Reducer._set_phase

        def set_and_check(reducer: Reducer, phase: Phase) -> None:
            set_phase(reducer, phase)
            check_pass(reducer)
            check_guard(reducer)

        monkeypatch.setattr(Reducer, "_set_phase", set_and_check)

    def _watching(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def transition(reducer: Reducer, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(reducer, *args, **kwargs)
            finally:
                check_pass(reducer)
                check_guard(reducer)
                self.seen.add(ReducerState.of(reducer))

        return transition


def check_pass(reducer: Reducer) -> None:
    has_pass = reducer.current is not None
    assert has_pass == (reducer.phase in WITH_PASS), f"in phase {reducer.phase.name} there is a pass: {has_pass}"


def check_guard(reducer: Reducer) -> None:
    guarded = id(reducer.unfinished) in _watchers()
    has_failed = reducer.current is not None and reducer.current.grads_left is not None
    expected = reducer.phase in WITH_GUARD or (reducer.phase is Phase.FINALIZING and has_failed)
    assert guarded == expected, f"in phase {reducer.phase.name} there is a guard: {guarded}"
