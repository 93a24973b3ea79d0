"""The wheel: it brings only the package `minddp`, its types, and what runs outside the repository."""

from __future__ import annotations

import shutil
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tests.processes import ROOT, python

pytest.importorskip("setuptools", reason="needs setuptools to build a wheel")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked: its folder takes the place of site-packages."""
    source, wheel = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("minddp", "reference", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    python("-c", program, str(wheel), cwd=source)
    [built] = wheel.glob("*.whl")
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(built).extractall(folder)
    return folder


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
    run = partial(python, "-m", cwd=tmp_path, PYTHONPATH=str(installed))
    assert "python -m minddp.reference.grade mine/1_naive.py:Naive" in run("minddp.reference.exercises", "mine")
    assert "\nfrom minddp.reference.interface import" in (tmp_path / "mine" / "1_naive.py").read_text()
    shutil.copy(ROOT / "reference" / "naive.py", tmp_path / "naive.py")
    text = (tmp_path / "naive.py").read_text().replace("from .", "from minddp.reference.")
    (tmp_path / "naive.py").write_text(text)
    run("minddp.reference.grade", "naive.py:Naive")
    assert "Record some steps of each rung" in run("minddp", "bench", "ladder", "--help")
