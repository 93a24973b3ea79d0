"""A broken session does not survive: each break shows in a training that loses a rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.elastic import test_survival as survival
from tests.tools.elastic.breaks import BREAKS, SurvivalBreak
from tests.tools.elastic.test_survival import fault, train

PLANS: dict[str, dict[str, Any]] = {
    survival.test_a_rank_dies_in_a_step.__name__: {"num_ranks": 3},
    survival.test_a_connection_is_lost_and_no_rank.__name__: {"num_ranks": 3},
    survival.test_an_attempt_to_connect_has_failed_on_one_rank_only.__name__: {
        "num_ranks": 3,
        "connect_limit_s": 600.0,
    },
    survival.test_a_rank_that_connects_too_late_is_waited_for_again.__name__: {
        "num_ranks": 3,
        "connect_limit_s": 3.0,
    },
    survival.test_what_has_died_is_started_again_and_gets_its_state_from_the_living.__name__: {
        "num_ranks": 2,
        "restarts": 1,
        "steps": 20,
        "hold": 10,
        "until_members": 2,
    },
    survival.test_a_stopped_process_counts_as_lost_and_joins_again_when_it_goes_on.__name__: {
        "num_ranks": 3,
        "join": {"silent_limit_s": 1.0},
    },
}

OTHER_FAULTS = {
    survival.test_a_connection_is_lost_and_no_rank.__name__: fault(2, "vote", 5, "stuck"),
    survival.test_an_attempt_to_connect_has_failed_on_one_rank_only.__name__: fault(
        2, "construction", 0, "failed attempt"
    ),
    survival.test_a_rank_that_connects_too_late_is_waited_for_again.__name__: fault(2, "construction", 0, "late"),
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.name.replace(" ", "-"))
def test_a_training_notices(broken: SurvivalBreak) -> None:
    name, _, moment = broken.test.partition("[")
    stops = "stopped" in name
    faults = [
        OTHER_FAULTS.get(name, fault(2, moment.rstrip("]") or "forward", 5, "SIGSTOP" if stops else "SIGKILL"))
    ]
    plan = dict(PLANS[name])
    num_ranks = plan.pop("num_ranks")
    if not stops:  # one that is stopped for ever is never waited for
        train(num_ranks, *faults, **plan)
    with pytest.raises(AssertionError):
        train(num_ranks, *faults, limit_s=15.0, broken=broken.name, **plan)
