"""`minddp exec`: another launcher's processes get minddp, and the command's exit status is the shell's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minddp.cli import main
from tests.compat.script import QUESTION


def test_python_started_by_any_command_gets_minddp(tmp_path: Path) -> None:
    launcher = f"{sys.executable} -c '{QUESTION}'; exit 4"
    done = subprocess.run(
        [sys.executable, "-m", "minddp", "exec", "sh", "-c", launcher],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("minddp."), done.stderr
    assert done.returncode == 4


def test_a_command_that_does_not_exist(capsys) -> None:
    assert main(["exec", "no-such-command"]) == 127
    assert capsys.readouterr().err == "minddp exec: no-such-command: No such file or directory.\n"


def test_no_command(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["exec"])
    assert "minddp exec: error" in capsys.readouterr().err
