"""The search finds wrappers that go wrong after a change, shrinks the scripts, and accepts a right one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.mid_training.generate import script_from
from tests.mid_training.script import Line, Script
from tests.mid_training.search import Search
from tests.parity.scenario import Options
from tests.ranks import RankPool

PoolOf = Callable[[int], RankPool]
MOST_SCRIPTS = 15

FAULTS = {
    "WrongWhereALayerIsReused": "reuse",
    "WrongInAnotherOrder": "reorder",
    "WrongWhereGradsExist": "put_grads",
    "WrongAfterNewMemory": "put_data",
    "WrongAfterEvaluation": "evaluate",
    "WritesToKeptGrads": "keep_grads",
    "NeverRaises": "drop",
}


def search_with(fault: str, pools: PoolOf, **limits: float) -> Search:
    return Search(pools, f"tests.mid_training.faults:{fault}", **limits)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, pools: PoolOf) -> None:
    """Among the first scripts that change what it depends on."""
    search = search_with(fault, pools, most_shrinks=0)
    scripts = ((seed, script_from(seed)) for seed in itertools.count())
    seeds = (seed for seed, script in scripts if FAULTS[fault] in {line.name for line in script.lines})
    for seed in itertools.islice(seeds, MOST_SCRIPTS):
        if not search.failures:
            search.from_seed(seed)
    assert search.failures, f"{search.played} scripts have not found the fault"


def test_a_script_that_fails_is_made_small(pools: PoolOf) -> None:
    search = search_with("WrongAfterEvaluation", pools)
    needless = [Line("zero_by", ("zeros",)), Line("train"), Line("clip"), Line("train"), Line("reorder", (1,))]
    needed = [Line("evaluate", ("no_grad", "before"))]
    options = Options(bucket_cap_mb_list=(0.02,), batched_grad_copy=True)
    script = Script(
        7, 2, "shared_memory", ("tied", "large", "norm"), options, lines=tuple(needless + needed + needless)
    )
    small, _ = search.shrunk(script, "fails")
    assert [line.name for line in small.lines] == ["evaluate"]
    assert (small.options, small.transport, len(small.layers)) == (Options(), "process_group", 1)
    assert small.calm_steps < script.calm_steps


def test_no_fault_is_found_where_there_is_none(pools: PoolOf) -> None:
    search = search_with("Faithful", pools)
    for seed in range(12):
        search.from_seed(seed)
    assert not search.failures, str(search)


def test_a_hang_ends_in_time_and_shows_the_line(pools: PoolOf) -> None:
    search = search_with("Hangs", pools, limit_s=10.0)
    script = Script(0, 2, "process_group", ("large",), Options(), lines=(Line("reorder", (0,)),))
    failure = search.play(script)
    assert failure is not None
    assert "gave no answer in time" in failure
    assert "do_wrong" in failure  # where rank 1 was
