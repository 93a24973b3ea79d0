"""The comparison notices wrappers with a fault, the search finds them, and both accept a right one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.parity.compare import difference, same_bits
from tests.parity.generate import script_from
from tests.parity.script import Line, Options, Script
from tests.parity.search import Search
from tests.ranks import RankPool

PoolOf = Callable[[int], RankPool]
MOST_SCRIPTS = 15


def search_with(fault: str, pools: PoolOf, **limits: float) -> Search:
    return Search(pools, f"tests.parity.faults:{fault}", **limits)


# ------------------------------------------------------------------ what is compared


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


# ------------------------------------------------------------------ wrappers that are wrong from the start

TRAIN = Line("train")
MIXED = ("large", "norm", "conv")
PLAIN = Script(MIXED, Options(bucket_cap_mb=0.01), (TRAIN, TRAIN, TRAIN), world_size=3, apart=True)
UNUSED = Script(("unused", "large"), lines=(TRAIN, TRAIN))
STEADY_FAULTS = {
    "ForgetsBuffers": (PLAIN, "buffer `layers.1.running_mean` differs"),
    "OtherBuckets": (PLAIN, "gradient of `layers.0.weight` differs"),
    "RoundsDifferently": (PLAIN, "line 0 `train()`: other bits than torch's"),
    "NeverComplains": (UNUSED, "in its next forward, minddp neither there nor in the optimizer's step"),
    "ComplainsOtherwise": (UNUSED, "minddp raises ValueError: Expected to have finished reduction"),
}


@pytest.mark.parametrize("fault", STEADY_FAULTS)
def test_a_steady_fault_is_noticed_and_named(fault: str, pools: PoolOf) -> None:
    script, words = STEADY_FAULTS[fault]
    failure = search_with(fault, pools).play(script)
    pools(script.world_size).kill()
    assert failure is not None
    assert words in failure


@pytest.mark.parametrize("subject", ["Faithful", "ComplainsEarly"])
@pytest.mark.parametrize(
    "script", [PLAIN, UNUSED, Script(MIXED, lines=(TRAIN, Line("fail", ("backward", 1)), TRAIN, TRAIN))]
)
def test_no_steady_fault_is_noticed_where_there_is_none(subject: str, script: Script, pools: PoolOf) -> None:
    search = search_with(subject, pools)
    assert search.play(script) is None
    assert any("raise" in note for note in search.last_notes) == (script is UNUSED)


# ------------------------------------------------------------------ wrappers that go wrong after a change

FAULTS = {
    "WrongWhereALayerIsReused": "reuse",
    "WrongAfterEvaluation": "evaluate",
    "WritesToKeptGrads": "keep_grads",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, pools: PoolOf) -> None:
    """Among the first scripts that change what it depends on."""
    search = search_with(fault, pools)
    scripts = ((seed, script_from(seed)) for seed in itertools.count())
    seeds = (seed for seed, script in scripts if FAULTS[fault] in {line.name for line in script.lines})
    for seed in itertools.islice(seeds, MOST_SCRIPTS):
        if not search.failures:
            search.from_seed(seed)
    assert search.failures, f"{search.played} scripts have not found the fault"


def test_a_hang_ends_in_time_and_shows_the_line(pools: PoolOf) -> None:
    search = search_with("Hangs", pools, limit_s=10.0)
    script = Script(("large", "small"), lines=(Line("reorder", (0,)), TRAIN), calm_steps=4)
    failure = search.play(script)
    assert failure is not None
    assert "gave no answer in time" in failure
    assert "do_wrong" in failure  # where rank 1 was
