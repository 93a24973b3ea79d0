from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from minddp.cli import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"{name} " in shown
        assert command[1] in shown


@pytest.mark.parametrize("words", [[], ["frobnicate"]])
def test_no_such_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert "usage: minddp" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """By leaving with status 0, or, where another process is asked, by returning it."""
    try:
        status = main([name, "--help"])
    except SystemExit as leaving:
        status = leaving.code
    assert status == 0
    assert "usage: " in capfd.readouterr().out


def test_the_command_line_itself_does_not_import_the_recipe() -> None:
    code = "import sys, minddp.cli; print(*[name for name in sys.modules if name.startswith('minddp.')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240).stdout
    assert "minddp.cli" in loaded
    assert "minddp.tools.train" not in loaded


@pytest.mark.parametrize("words", [["train", "--help"], ["doctor", "--help"]])
def test_a_closed_pipe_is_no_traceback(words: list[str]) -> None:
    """As in `minddp train --help | head -1`; here the reader has ended before."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "minddp", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE
