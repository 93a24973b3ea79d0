"""The state of a reducer, checked after each of its transitions, and all combinations that tests have seen.

`StateWatch` wraps the methods of `Reducer` through which its state changes. After each one, also after one that
raises, a pass must have come as far as its phase says. At the end of a run of pytest, `StateCount` adds up what the
tests of the core have seen in all of its workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

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
)


class ReducerState(NamedTuple):
    """What a reducer's next action may depend on. A field is False where its phase leaves no choice.

    Not whether buckets have memory: they are made when they are asked for.
    """

    phase: Phase
    finalizes_at_end: bool
    end_is_awaited: bool
    has_failed: bool
    is_recording: bool
    awaits_order: bool
    rebuild_is_due: bool

    @classmethod
    def of(cls, reducer: Reducer) -> ReducerState:
        current = reducer.current
        is_open = current is not None and current.phase in (Phase.ACCUMULATING, Phase.REDUCING)
        return cls(
            phase=reducer.phase,
            finalizes_at_end=reducer.phase is Phase.REDUCING and current.finalizes_at_end,
            end_is_awaited=is_open and current.ends.is_any_awaited(),
            has_failed=is_open and current.grads_left is not None,
            is_recording=reducer.usage_tracker.is_recording and reducer.phase is Phase.ACCUMULATING,
            awaits_order=reducer.phase is Phase.FINALIZING and reducer.awaits_order,
            rebuild_is_due=reducer.phase is Phase.IDLE and reducer.store._observed_order is not None,
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


MOST = 15  # each one more is a case that the reader of the reducer has to think of
WATCH = StateWatch()


class StateCount:
    """A plugin: too many combinations of state are a failure of the run."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of pytest-xdist has ended."""
        self.seen |= set(getattr(node, "workeroutput", {}).get("states", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.seen |= set(map(str, WATCH.seen))
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["states"] = sorted(self.seen)
        elif len(self.seen) > MOST:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.seen:
            terminalreporter.write_line(
                f"{len(self.seen)} combinations of a reducer's state occurred, at most {MOST} may."
            )
        if len(self.seen) > MOST:
            terminalreporter.write_line("\n".join(sorted(self.seen)), red=True)
