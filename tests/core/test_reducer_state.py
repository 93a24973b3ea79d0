"""The checks of a reducer's state are able to fail."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minddp.core.backward_pass import Phase
from tests.fakes import FakeDDP


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
