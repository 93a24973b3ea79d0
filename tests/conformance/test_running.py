"""How tests are run: the verdicts on tests that pass, fail, skip, crash, hang; and that a broken DDP is noticed."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.conformance import runner
from tests.conformance.selection import WHEEL, TestId, both_ways
from tests.conformance.swap import NATIVE, resolve
from tests.conformance.verdict import Status, Verdict

TOYS = both_ways("toy", "tests.conformance.toy_suite")
QUICK = ("test_DistributedDataParallelCPU", "test_accumulate_gradients_no_sync")


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Verdict], Path]:
    """The verdict on each toy test, by the name of its method, and the folder of logs."""
    logs = tmp_path_factory.mktemp("logs")
    methods = [
        "builds",
        "is_vacuous",
        "fails",
        "skips",
        "dies",
        "hangs",
        "hangs_at_first",
        "leaves_a_process_behind",
        "is_missing",
    ]
    tests = [TestId("toy", f"Toy.test_{method}") for method in methods] + [TestId("toy@cpu", "ToyOnGpu.test_moves")]
    verdicts = runner.run(tests, TOYS, NATIVE, runner.Conditions(jobs=2, limit_s=8.0), logs=logs)
    return {verdict.test.method.removeprefix("test_"): verdict for verdict in verdicts}, logs


@pytest.mark.parametrize(
    ("toy", "status", "reason"),
    [
        ("builds", Status.PASS, ""),
        ("is_vacuous", Status.VACUOUS, "passed without building what is tested"),
        ("fails", Status.FAIL, "ValueError: as was to be shown"),
        ("skips", Status.SKIP, "no reason"),
        ("dies", Status.FAIL, "the process died"),
        ("hangs", Status.TIMEOUT, "the first attempt hung. killed after 8 s"),
        ("hangs_at_first", Status.PASS, "the first attempt hung."),
        ("is_missing", Status.ABSENT, "the installed torch has no such test"),
        ("moves", Status.PASS, ""),
    ],
)
def test_each_outcome_of_a_test_has_its_verdict(
    toys: tuple[dict[str, Verdict], Path], toy: str, status: Status, reason: str
) -> None:
    verdict = toys[0][toy]
    assert (verdict.status, verdict.reason) == (status, reason), verdict.detail


def test_output_of_failing_tests_is_kept(toys: tuple[dict[str, Verdict], Path]) -> None:
    logs = {path.name: path.read_text() for path in toys[1].iterdir()}
    assert "waiting for ever" in logs["toy.Toy.test_hangs.txt"]
    assert "last words" in logs["toy.Toy.test_dies.txt"]
    assert "toy.Toy.test_builds.txt" not in logs


def test_nothing_outlives_a_test(toys: tuple[dict[str, Verdict], Path]) -> None:
    found = re.search(r"left behind: (\d+)", toys[0]["leaves_a_process_behind"].reason)
    assert found is not None
    deadline = time.monotonic() + 60.0
    while is_running(int(found[1])):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Killed processes whose parent does not collect them remain in the table as zombies: those do not run."""
    try:
        os.kill(pid, 0)
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("subject", "status"), [("Unchanged", Status.PASS), ("NeverSynchronises", Status.FAIL)])
def test_a_class_that_never_synchronises_is_noticed(subject: str, status: Status) -> None:
    """And the swap itself makes no difference."""
    tests = [TestId("ddp", f"TestDistBackendWithSpawn.{method}") for method in QUICK]
    verdicts = runner.run(tests, WHEEL, f"tests.conformance.toy_suite:{subject}", runner.Conditions())
    assert [verdict.status for verdict in verdicts] == [status] * len(tests), verdicts


def test_a_suite_that_cannot_be_imported_fails_with_the_reason() -> None:
    (suite, _) = both_ways("gone", "tests.conformance.gone")
    (verdict,) = runner.run([TestId("gone", "A.test_b")], [suite], NATIVE, runner.Conditions())
    assert verdict.reason == "import: ModuleNotFoundError: No module named 'tests.conformance.gone'"


def test_the_class_under_test_is_named_with_its_module() -> None:
    assert resolve("collections:Counter").__name__ == "Counter"
    with pytest.raises(ValueError, match=r"package\.module:Class"):
        resolve("Counter")
