"""Scenarios in which minddp once differed from torch, shrunk. They must not differ again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.replay import play
from tests.parity.scenario import (
    Accumulate,
    Evaluate,
    Interrupt,
    Layer,
    Model,
    Optimize,
    Options,
    Scenario,
    Train,
    ZeroGrad,
)
from tests.ranks import RankPool

_FINDING = Options(find_unused_parameters=True)
_STATIC = Options(static_graph=True)
_TRANSPOSED = Model((Layer("transposed"),))

FORMERLY = {
    "a gradient that no rank used this time was averaged all the same": Scenario(
        3, Model((Layer("branch_turn"),)), _FINDING, script=(Train(), Train())
    ),
    "what an interrupted pass had used counted as used in the next": Scenario(
        2,
        Model((Layer("branch_turn"), Layer("linear")), reversed_use=True),
        _FINDING,
        script=(Interrupt(depth=2), Train()),
    ),
    "a second backward counted as use in the next pass, although its gradient was gone": Scenario(
        2,
        Model((Layer("branch_turn"),), reversed_use=True),
        _FINDING,
        script=(Train(again=True), ZeroGrad(), Interrupt(), Train()),
    ),
    "a static graph took an interrupted first pass for its record": Scenario(
        2, Model((Layer("linear"),)), _STATIC, script=(Interrupt(), Train(), Train())
    ),
    "a static graph refused a first backward under no_sync, which follows a forward without one": Scenario(
        2,
        Model((Layer("batch_norm"),)),
        _STATIC,
        script=(Evaluate(no_grad=False), Accumulate(), Train(), Optimize(), Train(), Optimize()),
    ),
    "a bucket that no rank uses was skipped in a static graph's first backward, too": Scenario(
        2,
        Model((Layer("linear"), Layer("unused", dtype="float64"))),
        Options(static_graph=True, skip_all_reduce_unused_params=True),
        hook="take_notes",
        script=(ZeroGrad(), Train(), Optimize(), ZeroGrad(), Train()),
    ),
    "a hook saw gradients in the strides of their parameters": Scenario(
        2, _TRANSPOSED, hook="take_notes", script=(Train(),)
    ),
    "PowerSGD compressed a transposed matrix": Scenario(
        2, _TRANSPOSED, hook="power_sgd", script=(Train(), Train(), Train())
    ),
}


@pytest.mark.parametrize("what", FORMERLY, ids=lambda what: what.replace(" ", "-"))
def test_no_difference_any_more(what: str, ranks: Callable[[int], RankPool]) -> None:
    scenario = FORMERLY[what]
    assert play(scenario, ranks(scenario.world_size)) is None
