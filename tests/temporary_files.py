"""A run of the tests gets a temporary folder of its own, and fails if anything is left there at its end."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

PREFIX = "ddp-tests-"

# Left by torch's compiler, by torchrun (two), and by processes that were killed before they removed it.
TOLERATED = ("torchinductor_*", "torchelastic_*", "pytorch-errorfile-*", "pymp-*")


class TemporaryFiles:
    """A plugin for pytest. Subprocesses inherit the folder through TMPDIR; `tmp_path` stays where pytest has it."""

    def __init__(self, patience_s: float = 10.0) -> None:
        self.patience_s = patience_s  # processes that have just been killed may still hold their files
        get_temp_dir()  # that of multiprocessing lives as long as this process, so it comes before
        self.before = {name: os.environ.get(name) for name in ("TMPDIR", "PYTEST_DEBUG_TEMPROOT")}
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.left: list[str] = []
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)

    def names(self) -> list[str]:
        """What is in the folder and should not be."""
        return sorted(path.name for path in self.folder.iterdir() if not any(map(path.match, TOLERATED)))

    @pytest.hookimpl(trylast=True)  # after the workers have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        deadline = time.monotonic() + self.patience_s
        while (left := self.names()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.left = left
        if left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.left:
            terminalreporter.section("temporary files")
            terminalreporter.line(
                f"FAILED: the tests left {', '.join(self.left)} in the temporary folder.", red=True
            )

    def pytest_unconfigure(self) -> None:
        for name, value in self.before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        shutil.rmtree(self.folder, ignore_errors=True)
