"""The comparison with torch bites: every mutation of the core is noticed, and the core itself is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutations import (
    MUTATIONS,
    Mutation,
    StaleMutation,
    copy_of_minddp,
    run_scenario_with,
)
from tests.parity.scenario import Scenario
from tests.ranks import RankFailure, RankPool

TIME_LIMIT_S = 20.0


@pytest.fixture
def fresh_ranks() -> Iterator[dict[int, RankPool]]:
    """Pools, by world size, in which nothing has been imported yet."""
    pools = {n: RankPool(n, group_timeout_s=10.0) for n in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.kill()


def mismatches(scenario: Scenario, directory: Path, pools: dict[int, RankPool]) -> list[str]:
    """What the comparison says of the copy of minddp in `directory`. A rank that dies or hangs says so too."""
    try:
        reports = pools[scenario.world_size].run(run_scenario_with, directory, scenario, timeout_s=TIME_LIMIT_S)
    except RankFailure as failure:
        return [str(failure)]
    return [line for report in reports for line in report.mismatches]


def test_an_unmutated_copy_passes(tmp_path: Path, fresh_ranks: dict[int, RankPool]) -> None:
    directory = copy_of_minddp(tmp_path)
    for scenario in dict.fromkeys(mutation.scenario for mutation in MUTATIONS):
        assert mismatches(scenario, directory, fresh_ranks) == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_mutation_is_noticed(mutation: Mutation, tmp_path: Path, fresh_ranks: dict[int, RankPool]) -> None:
    found = mismatches(mutation.scenario, copy_of_minddp(tmp_path, mutation), fresh_ranks)
    assert found, f"nothing differs from torch although the core was made to {mutation.name}"
    assert re.search(mutation.shows, found[0]), f"noticed, but not as expected: {found[0]}"


@pytest.mark.parametrize("source", ["nothing of the kind", "two\ntwo"])
def test_a_stale_mutation_says_so(source: str) -> None:
    mutation = Mutation("rot", "core/plan.py", "two", "three", MUTATIONS[0].scenario)
    with pytest.raises(StaleMutation, match=r"Mutation `rot` replaces text that occurs \d times"):
        mutation.applied_to(source)
