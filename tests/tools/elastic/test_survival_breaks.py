"""A broken session does not survive: each break shows in a training that loses a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

import minddp
from tests.tools.elastic.breaks import BREAKS, SurvivalBreak
from tests.tools.elastic.test_survival import fault, train


@pytest.mark.slow
@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.name.replace(" ", "-"))
def test_a_training_notices(broken: SurvivalBreak) -> None:
    broken.applied_to((Path(minddp.__file__).parent / broken.file).read_text())  # or it is stale
    the_fault = fault(2, *broken.fault)
    train(3, the_fault, **broken.plan)
    with pytest.raises(AssertionError):
        train(3, the_fault, limit_s=15.0, broken=broken.name, **broken.plan)
