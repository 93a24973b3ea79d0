"""PyTorch's own tests with minddp's class in the place of torch's. `make conformance` runs torch's class, too."""

from __future__ import annotations

import pytest

from tests.conformance import runner
from tests.conformance.selection import CORE, WHEEL, TestId, read_list
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
