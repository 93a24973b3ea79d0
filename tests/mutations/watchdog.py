"""Mutations of `watchdog/`: missing gradients."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_MISSING = "watchdog/test_missing_gradients.py"

MUTATIONS = (
    Mutation(
        "let optimizers step on what is not averaged",
        "watchdog/missing_gradients.py",
        "any(id(param) in self._guarded for param in stepped)",
        "False",
        f"{_MISSING}::test_the_optimizer_is_stopped_in_the_same_iteration",
    ),
    Mutation(
        "stop every optimizer",
        "watchdog/missing_gradients.py",
        "any(id(param) in self._guarded for param in stepped)",
        "True",
        f"{_MISSING}::test_an_unrelated_optimizer_is_not_stopped",
    ),
    Mutation(
        "warn of the same parameters each time",
        "watchdog/missing_gradients.py",
        "if tuple(missing) not in self._warned_of:",
        "if True:",
        f"{_MISSING}::test_each_set_of_missing_parameters_is_one_warning",
    ),
    Mutation(
        "blame parameters that are not frozen",
        "watchdog/missing_gradients.py",
        "if not self._params[param].requires_grad]",
        "]",
        f"{_MISSING}::test_parameters_that_have_been_frozen_are_named",
    ),
)
