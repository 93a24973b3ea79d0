"""Small faults that are put into a copy of minddp. The tests must notice every one of them.

A `Mutation` replaces one piece of source text. The text must occur exactly once in its file, so a mutation that no
longer applies after a change of minddp is an error. Each names the unit tests that should fail, or a scenario in
which the faulty copy should differ from torch on real ranks.

Each module has the mutations of one folder of minddp, or of a part of the core.
"""

from __future__ import annotations

from tests.mutations import (
    acceleration,
    against_torch,
    core_backward,
    core_buckets,
    core_reducer,
    elastic,
    expectation,
    modes,
    strategies,
    train,
    watchdog,
    xray,
)
from tests.mutations.mutation import Mutation, StaleMutation, copy_of_minddp, run_scenario_with

__all__ = ["MUTATIONS", "Mutation", "StaleMutation", "copy_of_minddp", "run_scenario_with"]

MUTATIONS = (
    *against_torch.MUTATIONS,
    *core_backward.MUTATIONS,
    *core_buckets.MUTATIONS,
    *core_reducer.MUTATIONS,
    *expectation.MUTATIONS,
    *acceleration.MUTATIONS,
    *modes.MUTATIONS,
    *watchdog.MUTATIONS,
    *strategies.MUTATIONS,
    *xray.MUTATIONS,
    *elastic.MUTATIONS,
    *train.MUTATIONS,
)
