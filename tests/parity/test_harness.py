"""Tests of the search itself: what it compares, what it prints, and that it notices wrappers with a fault."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings

from tests.parity import scenario as vocabulary
from tests.parity.compare import difference, same_bits
from tests.parity.runner import run_scenario
from tests.parity.scenario import Accumulate, Interrupt, Layer, Model, Optimize, Options, Scenario, Train
from tests.parity.strategies import scenarios
from tests.ranks import RankFailure, RankPool


def test_the_comparison_of_bits_is_stricter_than_that_of_numbers() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    one = torch.ones(3, dtype=torch.bfloat16)
    assert same_bits(one, one.clone())
    assert not same_bits(one, torch.nextafter(one, 2 * one))


def test_a_difference_is_described_in_words() -> None:
    matrix = torch.zeros(2, 3)
    assert difference(matrix, matrix.clone()) is None
    assert difference(None, None) is None
    assert difference(None, matrix) == "should be None, is float32[2, 3]"
    assert difference(matrix, matrix.half()) == "should be float32[2, 3], is float16[2, 3]"
    assert difference(matrix, torch.zeros(3, 2).t()) == "should have strides (3, 1), has (1, 2)"
    assert difference(matrix, matrix + torch.eye(2, 3)) == "differs in 2 of 6 elements, by 1 at most"
    assert difference(matrix, matrix + 0.001, exact=False) is None


@settings(max_examples=50, derandomize=True, database=None, deadline=None)
@given(scenarios())
def test_a_printed_scenario_is_the_expression_that_makes_it(scenario: Scenario) -> None:
    assert eval(repr(scenario), dict(vars(vocabulary))) == scenario
    assert pickle.loads(pickle.dumps(scenario)) == scenario


MIXED = Model((Layer("linear"), Layer("batch_norm"), Layer("conv")), reversed_use=True)
PLAIN = Scenario(3, MIXED, Options(bucket_cap_mb=0.01), script=(Train(), Optimize(), Train(), Optimize(), Train()))
UNUSED = Scenario(2, Model((Layer("unused"), Layer("linear"))), script=(Train(), Train()))

FAULTS = {
    "ForgetsBuffers": (PLAIN, "step 2 `Train()`: buffer `blocks.1.inner.running_mean` differs"),
    "StartsApart": (PLAIN, "construction: parameter `blocks.0.inner.weight` differs"),
    "OtherBuckets": (PLAIN, "step 2 `Train()`: gradient of `blocks.0.inner.weight` differs"),
    "RoundsDifferently": (PLAIN, "step 0 `Train()`: gradient of `blocks.0.inner.weight` differs"),
    "NeverSilent": (
        Scenario(2, MIXED, script=(Accumulate(),)),
        "step 0 `Accumulate()`: gradient of `blocks.0.inner.weight` differs",
    ),
    "NeverComplains": (UNUSED, "the forward after step 0 `Train()`: torch raised RuntimeError: Expected to have"),
    "ComplainsOtherwise": (UNUSED, "but minddp raised ValueError: Expected to have finished reduction"),
    "ComplainsForNothing": (PLAIN, "step 0 `Train()`: torch went on, but minddp raised RuntimeError"),
    "ZeroesUnused": (
        Scenario(2, UNUSED.model, Options(find_unused_parameters=True), script=(Train(),)),
        "gradient of `blocks.0.idle.weight` should be None, is float32[16, 64]",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed_and_named(name: str, ranks: Callable[[int], RankPool]) -> None:
    scenario, words = FAULTS[name]
    pool = ranks(scenario.world_size)
    try:
        reports = pool.run(run_scenario, scenario, f"tests.parity.sabotage:{name}")
        found = "\n".join(line for report in reports for line in report.mismatches)
    except RankFailure as failure:
        found = str(failure)
    assert words in found


INTERRUPTED = Scenario(2, MIXED, script=(Train(), Interrupt(), Train(), Optimize(), Train()))


@pytest.mark.parametrize("name", ["Faithful", "ComplainsEarly"])
@pytest.mark.parametrize("scenario", [PLAIN, UNUSED, INTERRUPTED])
def test_no_fault_is_found_where_there_is_none(
    name: str, scenario: Scenario, ranks: Callable[[int], RankPool]
) -> None:
    reports = ranks(scenario.world_size).run(run_scenario, scenario, f"tests.parity.sabotage:{name}")
    assert [report.mismatches for report in reports] == [[]] * scenario.world_size
    assert (reports[0].ended_by is not None) == (scenario is UNUSED)
