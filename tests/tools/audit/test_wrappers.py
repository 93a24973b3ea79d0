"""Sharded parameters, other optimizers, communication hooks, sparse gradients, closures: real ranks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import minddp
from tests.ranks import RankPool
from tests.tools.audit import wrappers
from tests.tools.launch import jobs

RIGHT = {
    "FSDP2": (2, wrappers.fsdp, "", 1 / 2),
    "FSDP2, bf16": (2, wrappers.fsdp, "bf16", 1 / 2),
    "FSDP2, sharded by columns": (2, wrappers.fsdp, "columns", 1 / 2),
    "FSDP2, hybrid": (4, wrappers.fsdp, "hybrid", 1 / 4),
    "ZeRO-1": (2, wrappers.zero1, None, 1 / 2),
    "sparse": (2, wrappers.sparse, None, 1 / 2),
    "float16 on the wire": (2, wrappers.hooked, "fp16", 1 / 2),
    "closure": (2, wrappers.closure, None, 1 / 2),
    "two optimizers": (2, wrappers.two_optimizers, False, 1 / 2),
    "optimizers in turn": (2, wrappers.two_optimizers, True, 1 / 2),
    "a hook of the script's own": (2, wrappers.own_hook, None, 1 / 2),
    "by hand, with weights": (2, wrappers.by_hand, None, 1.0),
    "unused layers": (2, wrappers.unused_layers, None, 1 / 2),
}


@pytest.mark.parametrize("name", RIGHT)
def test_weights_are_those_of_the_mean(ranks: Callable[[int], RankPool], name: str) -> None:
    number, train, kind, weight = RIGHT[name]
    verdict, weights, _ = ranks(number).run(train, *([] if kind is None else [kind]))[0]
    assert (verdict.kind, verdict.is_fault) == ("right", False), verdict.text
    assert all(row == pytest.approx([weight] * len(row), rel=1e-3) for row in weights)


def test_compression_shows_as_a_residual(ranks: Callable[[int], RankPool]) -> None:
    verdict, *_ = ranks(2).run(wrappers.hooked, "power")[0]
    assert verdict.kind == "unexplained"
    assert not verdict.is_fault
    assert "of 3 of 6 parameters (`0.weight`, `2.weight`, `4.weight`)" in verdict.text


def test_fsdp_with_unequal_tokens(ranks: Callable[[int], RankPool]) -> None:
    """Means of 4 tokens on rank 0 and of 8 on rank 1."""
    verdict, weights, _ = ranks(2).run(wrappers.fsdp_of_means)[0]
    assert verdict.is_fault
    assert verdict.text.startswith("Each element of rank 0 counts 2 times as much as one of rank 1 in the gradient")
    assert weights == [pytest.approx([0.5, 0.5], rel=1e-3)]


def test_tensor_parallelism_is_refused(ranks: Callable[[int], RankPool]) -> None:
    error = ranks(2).run(wrappers.tensor_parallel)[0]
    assert error.startswith("Of `0.weight`, `0.bias` a rank has a part of each gradient (tensor parallelism)")
    assert error.endswith("Audit the script without parallelize_module.")


def test_a_step_that_is_not_finite_is_left_out(ranks: Callable[[int], RankPool]) -> None:
    verdict, _, notes = ranks(2).run(wrappers.not_finite)[0]
    assert verdict.text == "No step could be audited."
    assert notes[0] == "Step 1 of the audit is left out: a gradient is infinite or not a number."


def test_there_must_be_something_to_audit() -> None:
    with pytest.raises(ValueError, match="Pass the model or the optimizer"):
        minddp.audit()
    with pytest.raises(RuntimeError, match="There is no report"):
        _ = minddp.audit(warm_up=1).report


FRAMEWORKS = {
    "trainer": ("transformers", "Right: each counts by its number of elements"),
    "trainer apart": ("transformers", "Each element of rank 1 counts 2.7 times as much as one of rank 0"),
    "lightning": ("pytorch_lightning", "after averaging on all ranks alike: clipping"),
    "accelerated": ("accelerate", "Right: each counts 1/4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", FRAMEWORKS)
@pytest.mark.parametrize("native", [[], ["--native"]], ids=["minddp", "torch"])
def test_frameworks(tmp_path: Path, script: str, native: list[str]) -> None:
    """As from a shell, with a page."""
    package, text = FRAMEWORKS[script]
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    name, *arguments = script.split()
    path = str(Path(__file__).parent / "frameworks" / f"{name}.py")
    done = jobs.minddp("audit", *native, "--out", str(tmp_path), path, *arguments)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout.replace("\n", " ").replace("  ", " "), done.stdout + done.stderr
    assert text.split(":")[0] in (tmp_path / "audit.html").read_text()
