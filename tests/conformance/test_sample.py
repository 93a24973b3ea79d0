"""A part of PyTorch's own tests, with minddp's class in the place of torch's. `make conformance` runs them all."""

from __future__ import annotations

import pytest

from tests.conformance import report, runner
from tests.conformance.selection import CORE, SAMPLE, WHEEL, TestId, read_list
from tests.conformance.verdict import Status, Verdict

TESTS = [test for test in read_list(SAMPLE) if test not in report.read_exempt()]


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


def test_lists_agree() -> None:
    core = read_list(CORE)
    assert len(core) == len(set(core))
    assert set(read_list(SAMPLE)) < set(core)
    assert set(report.read_exempt()) <= set(core)
    assert len(report.read_exempt()) <= 3
