"""Every mutation of the core makes a test fail, and the core without mutations passes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import NO_MUTATION, ROOT, Mutants, apply
from tests.mutations import (
    MUTATIONS,
    Mutation,
    StaleMutation,
    copy_of_minddp,
    run_scenario_with,
)
from tests.parity.scenario import Scenario
from tests.ranks import RankFailure, RankPool

TIME_LIMIT_S = 60.0
FOLDERS = ("core", "expectation", "acceleration", "modes")

AGAINST_TORCH = [mutation for mutation in MUTATIONS if mutation.scenario is not None]
BY_UNIT_TESTS = [mutation for mutation in MUTATIONS if mutation.scenario is None]


def name_of(mutation: Mutation) -> str:
    return mutation.name.replace(" ", "-")


# ------------------------------------------------------------------ by unit tests


@pytest.fixture(scope="module")
def mutants(request: pytest.FixtureRequest) -> Iterator[Mutants]:
    """Runs the mutations of all tests that have been asked for."""
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    chosen = {call.params["mutation"] for call in calls if "mutation" in call.params}
    mutants = Mutants([mutation for mutation in BY_UNIT_TESTS if mutation in chosen])
    yield mutants
    mutants.kill()


@pytest.mark.parametrize("mutation", BY_UNIT_TESTS, ids=name_of)
def test_a_unit_test_notices(mutation: Mutation, mutants: Mutants) -> None:
    assert mutants.first_failure(NO_MUTATION) == "", "without a mutation all tests pass"
    failed = mutants.first_failure(mutation.name)
    assert failed, f"{mutation.tests} passes although minddp was made to {mutation.name}"
    assert failed.startswith("tests/"), f"not a test that failed: {failed}"


# ------------------------------------------------------------------ against torch, on real ranks


@pytest.fixture
def fresh_ranks() -> Iterator[dict[int, RankPool]]:
    """Pools, by world size, in which nothing has been imported yet."""
    pools = {n: RankPool(n, group_timeout_s=10.0) for n in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.kill()


def mismatches(scenario: Scenario, directory: Path, pools: dict[int, RankPool]) -> list[str]:
    """The differences of the copy of minddp in `directory` from torch; or that a rank died or hung."""
    try:
        reports = pools[scenario.world_size].run(run_scenario_with, directory, scenario, timeout_s=TIME_LIMIT_S)
    except RankFailure as failure:
        return [str(failure)]
    return [line for report in reports for line in report.mismatches]


def test_an_unmutated_copy_passes(tmp_path: Path, fresh_ranks: dict[int, RankPool]) -> None:
    directory = copy_of_minddp(tmp_path)
    for scenario in dict.fromkeys(mutation.scenario for mutation in AGAINST_TORCH):
        assert scenario is not None
        assert mismatches(scenario, directory, fresh_ranks) == []


@pytest.mark.parametrize("mutation", AGAINST_TORCH, ids=name_of)
def test_the_comparison_with_torch_notices(
    mutation: Mutation, tmp_path: Path, fresh_ranks: dict[int, RankPool]
) -> None:
    assert mutation.scenario is not None
    found = mismatches(mutation.scenario, copy_of_minddp(tmp_path, mutation), fresh_ranks)
    assert found, f"nothing differs from torch although the core was made to {mutation.name}"
    assert re.search(mutation.shows, found[0]), f"noticed, but not as expected: {found[0]}"


# ------------------------------------------------------------------ the mutations themselves


def test_every_file_is_mutated() -> None:
    mutated = {mutation.file for mutation in MUTATIONS}
    files = [path for folder in FOLDERS for path in sorted((ROOT / "minddp" / folder).glob("*.py"))]
    relative = [path.relative_to(ROOT / "minddp").as_posix() for path in files if path.name != "__init__.py"]
    assert [file for file in relative if file not in mutated] == []


def test_names_are_unique_and_each_has_one_way_to_be_noticed() -> None:
    assert [name for name, count in Counter(mutation.name for mutation in MUTATIONS).items() if count > 1] == []
    assert all(bool(mutation.tests) != bool(mutation.scenario) for mutation in MUTATIONS)


def test_a_mutation_that_changes_no_function_says_so() -> None:
    with pytest.raises(ValueError, match="mutation `nothing` changes no function"):
        apply(Mutation("nothing", "core/plan.py", "No tensor is touched here", "Nothing is", "core/test_plan.py"))


@pytest.mark.parametrize("source", ["nothing of the kind", "two\ntwo"])
def test_a_stale_mutation_says_so(source: str) -> None:
    mutation = Mutation("rot", "core/plan.py", "two", "three", MUTATIONS[0].tests)
    with pytest.raises(StaleMutation, match=r"Mutation `rot` replaces text that occurs \d times"):
        mutation.applied_to(source)
