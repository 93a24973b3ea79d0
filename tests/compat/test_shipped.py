"""The distributed tests that Accelerate and torchft ship in their wheels, with torch's class and with minddp's.

Each is run as its project runs it, and once more below `minddp exec`. The outcomes have to be equal, and
docs/frameworks.md shows them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
ACCELERATE = ("test_sync", "test_ops", "test_script")
LAUNCH = [
    "--cpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
]
TORCHFT = {
    "ddp_test.py": ("test_pure_ddp", "test_ddp"),
    "process_group_test.py": ("test_gloo_apis", "test_dummy", "test_functional_collectives"),
}


def run(*words: str, swaps: bool, folder: Path) -> subprocess.CompletedProcess[str]:
    """Python with these arguments; with minddp in the place of torch's class if `swaps`."""
    python = [sys.executable, "-m", "minddp", "exec", sys.executable] if swaps else [sys.executable]
    return subprocess.run(
        [*python, *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )


def outcomes(output: str) -> list[str]:
    """Pytest's, of each test."""
    return sorted(re.findall(r"^(?:PASSED|FAILED|ERROR) \S+", output, re.MULTILINE))


def on_the_page(suite: str, tests: Sequence[str]) -> None:
    """The page's table has each test, with the outcome of either class."""
    for test in tests:
        assert f"| {suite} | `{test}` | passes | passes |" in PAGE.read_text()


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs Accelerate: pip install accelerate")
@pytest.mark.parametrize("script", ACCELERATE)
def test_accelerates_own_scripts(script: str, tmp_path: Path) -> None:
    """Among them training that ends with the bits of one process, and accumulation under `no_sync`."""
    launch = ["-m", "accelerate.commands.launch", *LAUNCH, "--module", f"accelerate.test_utils.scripts.{script}"]
    native, ours = (run(*launch, swaps=swaps, folder=tmp_path) for swaps in (False, True))
    assert native.returncode == 0, native.stdout
    assert ours.returncode == 0, ours.stdout
    on_the_page("Accelerate", [script])


@pytest.mark.skipif(
    find_spec("torchft") is None or find_spec("parameterized") is None,
    reason="needs torchft and what its tests import: pip install torchft parameterized",
)
@pytest.mark.parametrize("file", TORCHFT)
def test_torchfts_own_tests(file: str, tmp_path: Path) -> None:
    spec = find_spec("torchft")
    assert spec is not None
    assert spec.origin is not None
    path, chosen = str(Path(spec.origin).with_name(file)), " or ".join(TORCHFT[file])
    pytest_options = [
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-k",
        chosen,
    ]
    native, ours = (run(*pytest_options, path, swaps=swaps, folder=tmp_path) for swaps in (False, True))
    assert outcomes(native.stdout) == outcomes(ours.stdout), ours.stdout
    for test in TORCHFT[file]:
        assert re.search(rf"^PASSED \S+::{test}(_0_cpu)?$", ours.stdout, re.MULTILINE), ours.stdout
    on_the_page("torchft", TORCHFT[file])
