"""PyTorch's own tests with minddp's class in the place of torch's. `make conformance` runs torch's class, too."""

from __future__ import annotations

import pytest

from tests.conformance import runner
from tests.conformance.selection import COLLECTIVES, CORE, WHEEL, TestId, read_list
from tests.conformance.swap import BACKEND
from tests.conformance.verdict import Status, Verdict

TESTS = read_list(CORE)


@pytest.fixture(scope="module")
def verdicts() -> dict[TestId, Verdict]:
    all_of_them = runner.run(TESTS, WHEEL, "minddp:DistributedDataParallel", runner.Conditions())
    return {verdict.test: verdict for verdict in all_of_them}


@pytest.mark.timeout(400)  # the first one waits for all
@pytest.mark.parametrize("test", TESTS, ids=str)
def test_minddp_passes(test: TestId, verdicts: dict[TestId, Verdict]) -> None:
    verdict = verdicts[test]
    if verdict.status is Status.ABSENT:
        pytest.skip(verdict.reason)
    assert verdict.status is Status.PASS, verdict.detail or verdict.reason


ON_THREE = (
    "all_reduce_max",
    "sparse_all_reduce_sum",
    "scatter",
    "gather",
    "send_recv",
    "all_gather_object_subgroup",
)
SAMPLE = [test for test in read_list(COLLECTIVES) if test.suite != "collectives-3"] + [
    TestId("collectives-3", f"TestDistBackendWithSpawn.test_{name}") for name in ON_THREE
]


@pytest.mark.timeout(400)
def test_the_backend_passes_a_sample_of_the_tests_of_collectives() -> None:
    """On as many ranks as they need. Over gloo all of them pass; `docs/backend_conformance.md` has the others."""
    verdicts = runner.run(SAMPLE, WHEEL, f"{BACKEND}minddp", runner.Conditions())
    failed = {verdict.test.method: verdict.reason for verdict in verdicts if verdict.status is not Status.PASS}
    known = {
        "test_barrier_timeout_group",
        "test_all_gather_group",
        "test_all_reduce_group_sum",
    }
    assert set(failed) <= known, failed
