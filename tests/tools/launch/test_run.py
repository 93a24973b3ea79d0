"""`minddp run`, as a user starts it: scripts that do not mention minddp, their children, and how jobs end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minddp.cli import main
from minddp.tools.job.launcher import RanksFailed
from minddp.tools.launch import run as command
from tests.tools.launch import script
from tests.tools.launch.jobs import end_of, minddp, start


@pytest.mark.slow
def test_a_script_and_its_children_get_minddp_and_the_same_bits(ranks, tmp_path: Path) -> None:
    options = ["--nproc-per-node", "2", script.__file__, str(tmp_path), "--epochs", "3"]
    done = minddp("run", *options, cwd=tmp_path)
    assert done.returncode == 0, done
    for rank, native in enumerate(ranks(2).run(script.train)):
        result: dict[str, Any] = torch.load(tmp_path / f"{rank}.pt")
        assert native["class"] == "torch.nn.parallel.distributed"
        assert result["class"].startswith("minddp.")
        assert result["recognised"]
        assert result["children"] == ([] if rank else [result["class"]] * 3)  # forked, spawned, started
        assert result["arguments"] == ("--epochs", "3")
        for param, same in zip(native["params"], result["params"], strict=True):
            assert torch.equal(param, same)


def test_the_exit_status_of_a_module_that_fails_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(int(sys.argv[2]))\ntime.sleep(60)\n"
    )
    done = minddp("run", "--nproc-per-node=2", "-m", "job", "--status", "5", cwd=tmp_path)
    assert done.returncode == 5, done
    assert "minddp run: Rank 1" in done.stderr.splitlines()[-1]
    assert "failed with exit status 5" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stdout + done.stderr


def test_a_signal_ends_the_job_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import time\nopen('ready', 'w').close()\ntime.sleep(60)\n")
    process = start("run", "job.py", cwd=tmp_path)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    done = end_of(process)
    assert done.returncode == 128 + signal.SIGTERM, done
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--number-of-ranks", "2"], "minddp run: error"),
        (["--run-path", "--start-method", "fork"], "--start-method fork starts ranks without minddp"),
    ],
    ids=["torchrun does not know it", "the ranks would not get minddp"],
)
def test_options_that_are_refused(words: list[str], says: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", *words, "train.py"])
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("exitcode", "status"), [(3, 3), (-9, 137)])
def test_the_exit_status_is_that_of_a_shell(exitcode: int, status: int, monkeypatch, capsys) -> None:
    def fail(_options: object) -> None:
        raise RanksFailed("Rank 7 has failed.", exitcode)

    monkeypatch.setattr(command.torchrun, "run", fail)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit) as stopped:
        main(["run", script.__file__])
    assert stopped.value.code == status
    assert capsys.readouterr().err == "minddp run: Rank 7 has failed.\n"


@pytest.mark.slow
def test_a_script_that_asks_for_gloo_gets_the_backend_under_that_name(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import datetime, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group(*sys.argv[1:])\n"
        "beside = dist.new_group([0, 1])\n"
        "ones = torch.ones(5)\n"
        "dist.all_reduce(ones, group=beside)\n"
        "if sys.argv[1:]:\n"
        "    dist.monitored_barrier()\n"
        "groups = (dist.group.WORLD, beside)\n"
        "shared = [getattr(group, 'shares_memory', False) for group in groups]\n"
        "print(f'{dist.get_backend()} {ones[0].item()} {shared}\\n', end='')\n"
        "dist.destroy_process_group()\n"
    )
    for options, asked, expected in (
        (["--backend", "minddp"], ["gloo"], "gloo 2.0 [True, True]"),
        (["--backend", "minddp"], [], "undefined 2.0 [True, True]"),
        ([], ["gloo"], "gloo 2.0 [False, False]"),
    ):
        done = minddp("run", *options, "--nproc-per-node", "2", "job.py", *asked, cwd=tmp_path)
        assert done.returncode == 0, done
        assert done.stdout.count(expected) == 2, done
