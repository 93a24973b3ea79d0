"""Everything that is text in, text out: rewriting, discovery, verdicts, lists, reports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conformance import report
from tests.conformance.cpu_rewrite import STAND_INS, OnCpu
from tests.conformance.selection import TestId, both_ways, by_suite, read_list
from tests.conformance.verdict import Report, Status, Verdict, judge, telling_line

TEST = TestId("ddp", "A.test_b")


# ------------------------------------------------------------------ rewriting


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model.cuda(rank)", "S.cuda_method(model, rank)"),
        ("Net().to(rank).train()", "S.to_method(Net(), rank).train()"),
        ("torch.device('cuda', 1)", "S.device('cuda', 1)"),
        ("device('cuda')", "device('cuda')"),
        ("torch.zeros(1, device=rank)", "torch.zeros(1, device=S.on_cpu(rank))"),
        ("replicate(net, device_id=rank)", "replicate(net, device_id=S.on_cpu(rank))"),
        ("torch.cuda.Stream()", "S.cuda_module.Stream()"),
        ("torch.cuda.device(1)", "S.cuda_module.device(1)"),
        ("torch.accelerator.set_device_index(1)", "S.accelerator_module.set_device_index(1)"),
        ("dist.init_process_group('nccl')", "dist.init_process_group('gloo')"),
        ("dist.new_group(ranks, backend='nccl')", "dist.new_group(ranks, backend='gloo')"),
        ("BACKEND == 'nccl'", "BACKEND == 'nccl'"),
        ("dim = 1000", "dim = 64"),
    ],
)
def test_an_expression_is_rewritten_for_the_cpu(before: str, after: str) -> None:
    assert rewritten(before) == f"import tests.conformance.cpu_stand_ins as {STAND_INS}\n{after}".replace(
        "S.", f"{STAND_INS}."
    )


def test_decorators_that_ask_for_gpus_are_dropped_and_others_stay() -> None:
    source = (
        "@skip_if_lt_x_gpu(2)\n@skipIfRocm\n@unittest.skipIf(not TEST_CUDA, 'no')\n"
        "@skip_but_pass_in_sandcastle_if(BACKEND not in DDP, 'no')\n@with_dist_debug_levels(['OFF'])\n"
        "def test_it(self):\n    pass"
    )
    kept = [line.partition("(")[0] for line in rewritten(source).splitlines() if line.startswith("@")]
    assert kept == ["@skip_but_pass_in_sandcastle_if", "@with_dist_debug_levels"]


def test_docstring_and_future_imports_stay_first() -> None:
    lines = rewritten('"""Doc."""\nfrom __future__ import annotations\nimport torch').splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["__future__", "tests.conformance.cpu_stand_ins", "torch"]


def rewritten(source: str) -> str:
    return ast.unparse(OnCpu().visit(ast.parse(source)))


# ------------------------------------------------------------------ verdicts


def test_the_reason_is_the_exception_in_a_ranks_traceback() -> None:
    text = (
        "Traceback (most recent call last):\nRuntimeError: Process 0 exited with error code 10 and exception:\n"
        "Traceback (most recent call last):\nAssertionError: Tensor-likes are not close!\n\nMismatched: 9 / 9\n"
    )
    assert telling_line(text) == "AssertionError: Tensor-likes are not close!"
    assert telling_line("RuntimeError: Process 1 terminated") == "RuntimeError: Process 1 terminated"
    assert telling_line("") == "no reason given"


def test_a_verdict_says_what_happened() -> None:
    def status(report: Report | None, seconds: float = 1.0) -> Status:
        return judge(TEST, report, seconds, log="", limit_s=60.0).status

    assert status(Report(Status.PASS, "", constructions=2)) is Status.PASS
    assert status(Report(Status.PASS, "", constructions=0)) is Status.VACUOUS
    assert status(Report(Status.FAIL, "ValueError", constructions=0)) is Status.FAIL
    assert status(Report(Status.FAIL, "Process 0 terminated or timed out after 50 s", 2)) is Status.TIMEOUT
    assert status(None) is Status.FAIL
    assert status(None, seconds=60.0) is Status.TIMEOUT


# ------------------------------------------------------------------ lists


def test_ids(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("# of two\nddp::A.test_b\n\nrpc::A.test_c\n")
    tests = read_list(path)
    assert [str(test) for test in tests] == ["ddp::A.test_b", "rpc::A.test_c"]
    suites = both_ways("ddp", "m", ())
    assert by_suite(tests[:1], suites) == {suites[0]: tests[:1]}
    with pytest.raises(ValueError, match="of no known suite"):
        by_suite(tests, suites)
    with pytest.raises(ValueError, match=r"suite::Class\.method"):
        TestId.parse("test_b")


# ------------------------------------------------------------------ reports


def test_only_what_passes_natively_is_compared() -> None:
    other = TestId("ddp", "A.test_c")
    native = [Verdict(TEST, Status.PASS, 1.0), Verdict(other, Status.SKIP, 0.1, "no GPU")]
    failing = Verdict(TEST, Status.FAIL, 1.0, "ValueError: a | b in /home/someone/x.py")
    row, not_compared = report.compare(native, [failing])
    assert (row.conforms, not_compared.conforms) == (False, True)
    table = report.table([row, not_compared], "pkg:Class", "python -m it")
    assert "| test_b | pass | fail | ValueError: a \\| b in x.py |" in table
    assert "| test_c | skip | not run | no GPU |" in table
    assert "- torch's own class: 1 pass, 1 skip\n- `pkg:Class`, where torch's own passes: 1 fail" in table
