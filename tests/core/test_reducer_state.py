"""How many states of a reducer the tests of the core have seen, and that a forbidden one does not pass."""

from __future__ import annotations

import os

import pytest
from torch import nn

from minddp.core.backward_pass import Phase
from tests.fakes import FakeDDP
from tests.reducer_state import StateWatch

MOST = 40


def test_few_combinations_of_state_occur(request: pytest.FixtureRequest, state_watch: StateWatch) -> None:
    """Each one more is a case that the reader of the reducer has to think of."""
    names = {item.path.name for item in request.session.items}
    is_one_of_several = "PYTEST_XDIST_WORKER" in os.environ
    if is_one_of_several or not {"test_reducer.py", "test_bucket_store.py", "test_mode.py"} <= names:
        pytest.skip("only part of the core's tests has run in this process; see `make states`")
    seen = sorted(state_watch.seen, key=str)
    assert {state.phase for state in seen} == set(Phase)
    assert [state.has_guard for state in seen if state.phase is Phase.FINALIZING] == [True], "after a failure alone"
    assert len(seen) <= MOST, "\n".join(map(str, seen))


def test_a_pass_in_the_wrong_phase_is_noticed() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    ddp.reducer.phase = Phase.ACCUMULATING
    with pytest.raises(AssertionError, match="in phase ACCUMULATING there is a pass: False"):
        ddp.reducer.rebuild_if_due()


def test_a_guard_in_the_wrong_phase_is_noticed() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    ddp.reducer.unfinished.guard(ddp.reducer)
    with pytest.raises(AssertionError, match="in phase IDLE there is a guard: True"):
        ddp.reducer.rebuild_if_due()
    ddp.reducer.unfinished.lift_guard()


def test_a_transition_to_the_wrong_phase_is_noticed() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    with pytest.raises(AssertionError, match="in phase FINALIZING there is a pass: False"):
        ddp.reducer._set_phase(Phase.FINALIZING)
