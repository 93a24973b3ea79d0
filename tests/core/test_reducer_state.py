"""How many states of a reducer the tests of the core have seen, and that a forbidden one does not pass."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from minddp.core.backward_pass import Phase
from tests.fakes import FakeDDP
from tests.reducer_state import StateWatch

MOST = 15


def test_few_combinations_of_state_occur(request: pytest.FixtureRequest, state_watch: StateWatch) -> None:
    """Each one more is a case that the reader of the reducer has to think of."""
    names = {item.path.name for item in request.session.items}
    is_one_of_several = "PYTEST_XDIST_WORKER" in os.environ
    if is_one_of_several or not {"test_reducer.py", "test_bucket_store.py", "test_mode.py"} <= names:
        pytest.skip("only part of the core's tests has run in this process; see `make states`")
    seen = sorted(state_watch.seen, key=str)
    assert {state.phase for state in seen} == set(Phase)
    assert len(seen) <= MOST, "\n".join(map(str, seen))


def test_a_pass_in_the_wrong_phase_is_noticed() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    ddp(torch.ones(1, 2))
    assert ddp.reducer.current is not None
    ddp.reducer.current.phase = Phase.IDLE
    with pytest.raises(AssertionError, match="a pass in phase IDLE has been kept"):
        ddp.reducer.rebuild_if_due()


def test_a_pass_that_says_too_early_that_all_is_launched_is_noticed() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    ddp(torch.ones(1, 2))
    assert ddp.reducer.current is not None
    ddp.reducer.current.phase, ddp.reducer.current.groups_left = Phase.ACCUMULATING, [1]
    with pytest.raises(AssertionError, match="REDUCING before all are launched"):
        ddp.reducer._enter(Phase.REDUCING)


def test_a_forbidden_transition_is_an_error() -> None:
    ddp = FakeDDP(nn.Linear(2, 2))
    ddp(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="in phase ARMED cannot become FINALIZING"):
        ddp.reducer._enter(Phase.FINALIZING)
