"""The wheel: it brings only the package `minddp`, its types, and what runs outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="needs setuptools to build a wheel")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked: its folder takes the place of site-packages."""
    source, wheel = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("minddp", "reference", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = ran(["-c", program, str(wheel)], source)
    assert done.returncode == 0, done.stderr
    [built] = wheel.glob("*.whl")
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(built).extractall(folder)
    return folder


def ran(arguments: Sequence[str], where: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(path)} if path else dict(os.environ)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_only_minddp_is_in_site_packages_and_its_hints_count(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"minddp"}
    assert (installed / "minddp" / "py.typed").is_file()
    for ours in ("minddp", "reference", "benchmarks"):
        for path in (ROOT / ours).rglob("*.py"):
            inside = path.relative_to(ROOT)
            place = {"reference": "minddp/reference", "benchmarks": "minddp/beside/benchmarks"}.get(ours, "minddp")
            assert (installed / place / inside.relative_to(ours)).is_file(), inside


@pytest.mark.slow
def test_what_is_beside_it_runs_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    """Python finds the wheel's `minddp` first, and then none of the repository's other packages."""
    done = ran(["-m", "minddp.reference.exercises", "mine"], tmp_path, installed)
    assert done.returncode == 0, done.stderr
    assert "python -m minddp.reference.grade mine/1_naive.py:Naive" in done.stdout
    assert "\nfrom minddp.reference.interface import" in (tmp_path / "mine" / "1_naive.py").read_text()
    shutil.copy(ROOT / "reference" / "naive.py", tmp_path / "naive.py")
    text = (tmp_path / "naive.py").read_text().replace("from .", "from minddp.reference.")
    (tmp_path / "naive.py").write_text(text)
    done = ran(["-m", "minddp.reference.grade", "naive.py:Naive"], tmp_path, installed)
    assert done.returncode == 0, done.stdout + done.stderr
    done = ran(["-m", "minddp", "bench", "ladder", "--help"], tmp_path, installed)
    assert done.returncode == 0, done.stderr
    assert "Record some steps of each rung" in done.stdout
