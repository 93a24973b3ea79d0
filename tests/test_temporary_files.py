"""The check of temporary files fails a run that leaves one, and puts everything back."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.temporary_files import TemporaryFiles


@pytest.mark.parametrize(("name", "left"), [("minddp-test-x", ["minddp-test-x"]), ("torchinductor_root", [])])
def test_what_is_left_fails_the_run(name: str, left: list[str]) -> None:
    before = tempfile.gettempdir(), dict(os.environ)
    files = TemporaryFiles(patience_s=0.2)
    try:
        code = f"import os, tempfile; os.mkdir(os.path.join(tempfile.gettempdir(), {name!r}))"
        subprocess.run([sys.executable, "-c", code], timeout=240, check=True)
        session: Any = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
        files.pytest_sessionfinish(session)
        assert files.left == left
        assert session.exitstatus == (pytest.ExitCode.TESTS_FAILED if left else pytest.ExitCode.OK)
    finally:
        files.pytest_unconfigure()
    assert (tempfile.gettempdir(), dict(os.environ)) == before
    assert not files.folder.exists()


def test_tmp_path_is_elsewhere(tmp_path: Path) -> None:
    assert not tmp_path.is_relative_to(tempfile.gettempdir())
