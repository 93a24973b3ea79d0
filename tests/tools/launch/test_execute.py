"""`minddp exec`: another launcher's processes get minddp, and the command's exit status is the shell's."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from minddp.cli import main
from minddp.tools.launch.execute import add_options
from tests.tools.launch.jobs import minddp
from tests.tools.launch.script import QUESTION


def test_python_started_by_any_command_gets_minddp(tmp_path: Path) -> None:
    done = minddp("exec", "sh", "-c", f"{sys.executable} -c '{QUESTION}'; exit 4", cwd=tmp_path)
    assert done.stdout.startswith("minddp."), done.stderr
    assert done.returncode == 4


def test_no_command_or_one_that_does_not_exist(capsys) -> None:
    assert main(["exec", "no-such-command"]) == 127
    assert capsys.readouterr().err == "minddp exec: no-such-command: No such file or directory.\n"
    with pytest.raises(SystemExit):
        main(["exec"])
    assert "minddp exec: error: the following arguments are required: command" in capsys.readouterr().err


@pytest.mark.parametrize(
    "statement", ["import minddp", "from minddp.compat.surface import DistributedDataParallel"]
)
def test_minddp_may_be_imported_before_torch(statement: str) -> None:
    done = minddp("exec", sys.executable, "-c", f"{statement}; {QUESTION}")
    assert done.stdout.startswith("minddp."), done.stderr


def test_only_the_command_pays_for_torch() -> None:
    """Elsewhere `import minddp` imports torch, to make its backend known."""
    program = (
        "import sys; sys.argv[0] = '/usr/bin/minddp'; "
        "import minddp.cli, minddp.tools.launch.execute; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=240, check=False).returncode == 0


def test_a_file_for_findings_that_cannot_be_written_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--watch-json", str(tmp_path / "missing" / "found.jsonl")])
    assert "found.jsonl cannot be written: No such file or directory." in capsys.readouterr().err
    assert parser.parse_args(["--watch-json", str(tmp_path / "found.jsonl")]).watch_json.exists()
