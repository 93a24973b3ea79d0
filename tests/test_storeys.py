"""The wrapper stands alone: without the tools, the class of `ddp.py` has torch's bits, and that of `compat/` passes
PyTorch's own tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.processes import ROOT, python

NEEDS_TOOLS = ("tools", "elastic.py", "xray.py", "cli.py", "__main__.py")
CLASS = {"MINDDP_PARITY_SUBJECT": "minddp.ddp:DistributedDataParallel"}


@pytest.fixture(scope="module")
def below(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository without the upper storey, which exports the class of `compat/`."""
    copy = tmp_path_factory.mktemp("below")
    shutil.copytree(ROOT / "minddp", copy / "minddp", ignore=shutil.ignore_patterns("__pycache__", *NEEDS_TOOLS))
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__", "tools"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    # Nor is it found where minddp is installed.
    (copy / "minddp" / "tools.py").write_text("raise ImportError('There is no upper storey.')")
    exports = copy / "minddp" / "__init__.py"
    exports.write_text(exports.read_text().replace("minddp.tools.wrapper", "minddp.compat.surface"))
    return copy


def run(below: Path, *command: str, **environment: str) -> str:
    """What `python command` prints there."""
    return python(*command, cwd=below, timeout_s=900, PYTHONPATH=str(below), **environment)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_copy_has_no_tools(below: Path) -> None:
    program = (
        "import minddp; print(minddp.__file__)\ntry: import minddp.tools\nexcept ImportError as error: print(error)"
    )
    assert run(below, "-c", program).splitlines() == [
        str(below / "minddp" / "__init__.py"),
        "There is no upper storey.",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_parity(below: Path) -> None:
    assert "60 scripts" in run(below, "-m", "tests.parity", "--seed", "70000", "--count", "60", **CLASS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tests_of_pytorch(below: Path) -> None:
    assert "where it passes: 11 pass" in run(below, "-m", "tests.conformance", "-k", "^ddp::")
