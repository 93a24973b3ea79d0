"""The `sitecustomize` that installs minddp, in Python processes where `torch` and `minddp` are stand-ins.

That for minddp prints when it is installed, and if torch was imported completely by then.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minddp.tools.launch.execute import STARTUP_FOLDER, installing

TORCH = "ready = False\nimport torch.part\nready = True\n"
MINDDP = "import torch\ndef install():\n    print('installed, torch ready:', torch.ready)\n"
INSTALLED = "installed, torch ready: True"
LOOKS = """
import sys, torch
print(type(torch.__loader__).__name__, torch.__spec__.loader is torch.__loader__)
print("exec_module" in vars(torch.__loader__))
print([finder for finder in sys.meta_path if type(finder).__name__ == "TorchFinder"])
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "torch" / "part.py").write_text("")
    (tmp_path / "minddp.py").write_text(MINDDP)
    return tmp_path


def python(program: str, packages: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an environment like that of `minddp run`."""
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        cwd=packages,  # not in the repository, whose minddp would come before the stand-in
        env=installing(os.environ | {"PYTHONPATH": str(packages)}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def output(program: str, packages: Path) -> list[str]:
    done = python(program, packages)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("import torch; print('imported'); import torch.part", [INSTALLED, "imported"]),
        (f"import sys; print('minddp' in sys.modules, {str(STARTUP_FOLDER)!r} in sys.path)", ["False False"]),
        ("from importlib.util import find_spec; find_spec('torch'); find_spec('torch'); import torch", [INSTALLED]),
        (LOOKS, [INSTALLED, "SourceFileLoader True", "False", "[]"]),
    ],
    ids=[
        "when the import of torch is complete",
        "a process without torch sees nothing of it",
        "looking for torch without importing it does not use the hook up",
        "torch looks as if it had been imported without the hook",
    ],
)
def test_when_minddp_is_installed(program: str, lines: list[str], packages: Path) -> None:
    assert output(program, packages) == lines


def test_minddp_may_be_what_imports_torch(packages: Path) -> None:
    """`import minddp` first: its own import has to be complete, too, before it is installed."""
    (packages / "minddp.py").write_text(f"import torch; print('part of minddp')\n{MINDDP}")
    program = "import minddp; print('imported'); import torch"
    assert output(program, packages) == ["part of minddp", INSTALLED, "imported"]


@pytest.mark.parametrize(
    ("file", "content", "says", "printed"),
    [
        ("torch/part.py", "raise OSError('no driver')", "OSError: no driver", []),
        ("sitecustomize.py", "raise RuntimeError('theirs')", "RuntimeError: theirs", [INSTALLED]),
    ],
    ids=["torch fails as without the hook", "a sitecustomize is reported and minddp is installed"],
)
def test_what_fails_to_import(packages: Path, file: str, content: str, says: str, printed: list[str]) -> None:
    (packages / file).write_text(content)
    done = python("import torch", packages)
    assert says in done.stderr
    assert done.stdout.splitlines() == printed


def test_the_sitecustomize_that_is_hidden_runs_and_is_the_one_that_counts(packages: Path) -> None:
    (packages / "sitecustomize.py").write_text("import sys; print('theirs', sys.argv); mark = 7")
    program = "import sitecustomize; print(sitecustomize.mark); import torch"
    assert output(program, packages) == ["theirs ['-c']", "7", INSTALLED]


def test_torch_that_is_there_already_is_taken_over_at_once(packages: Path) -> None:
    """As when a .pth file has imported it before any sitecustomize is run."""
    program = "import torch, sitecustomize; print('main')"
    assert python(program, packages, "-S").stdout.splitlines() == [INSTALLED, "main"]


@pytest.mark.parametrize(
    ("before", "after"), [("", [str(STARTUP_FOLDER)]), ("/a::/b", [str(STARTUP_FOLDER), "/a", "", "/b"])]
)
def test_the_folder_goes_to_the_head_of_pythonpath(before: str, after: list[str]) -> None:
    changed = installing({"HOME": "/h", "PYTHONPATH": before})
    assert changed.pop("PYTHONPATH").split(os.pathsep) == after
    assert changed == {"HOME": "/h"}
