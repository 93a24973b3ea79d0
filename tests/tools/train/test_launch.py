"""Whole runs, started as a user starts them: `minddp train` and torchrun, Ctrl-C and killed processes."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minddp.tools.train.settings import Settings
from tests.tools.train.kills import kill_at_random
from tests.tools.train.runs import assert_same_bits, command_line, final_bits, records, tiny, train_here

PATIENCE_S = 240.0


def long_run(out: Path) -> Settings:
    """A run that is still going when a signal comes, however late. What is learned does not depend on its end."""
    return tiny(
        out, ddp="torch", steps=100_000, schedule="constant", validate_every=100_000, checkpoint_every=50, threads=1
    )


def start(settings: Settings) -> subprocess.Popen[str]:
    """`minddp train` in a session of its own, like a terminal's."""
    command = [sys.executable, "-m", "minddp", "train", *command_line(settings)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for_records(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until that many training records are written."""
    deadline = time.monotonic() + PATIENCE_S
    path = folder / "metrics.jsonl"
    while not path.exists() or path.read_text().count('"training"') < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run does not get going"
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """The process's children: of a launcher, its ranks in order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids: list[int]) -> bool:
    """True if all of the processes have ended, within a few seconds."""
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ctrl_c_then_resumed_under_torchrun_ends_with_the_same_bits(ranks, tmp_path: Path) -> None:
    settings = long_run(tmp_path / "broken")
    process = start(settings)
    wait_for_records(settings.folder, 5, process)
    workers = children_of(process.pid)
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 128 + signal.SIGINT, output
    assert "reason SIGINT" in output
    assert gone(workers)
    stopped_at = final_bits(settings.folder)["step"]
    assert stopped_at >= 5

    settings = dataclasses.replace(settings, steps=stopped_at + 20)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "minddp", "train", *command_line(settings), "--resume", "auto"]
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert resumed.returncode == 0, resumed.stderr

    whole = dataclasses.replace(settings, out=tmp_path / "whole")
    ranks(2).run(train_here, whole)
    assert_same_bits(final_bits(settings.folder), final_bits(whole.folder))
    assert records(settings.folder, "training") == records(whole.folder, "training")


def test_a_killed_rank_ends_the_job_with_an_error_that_names_it(tmp_path: Path) -> None:
    settings = dataclasses.replace(long_run(tmp_path), checkpoint_every=3)
    process = start(settings)
    wait_for_records(tmp_path, 10, process)
    workers = children_of(process.pid)
    os.kill(workers[1], signal.SIGKILL)
    output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 1, output
    last_words = output.strip().splitlines()[-1]
    assert f"Rank 1 (pid {workers[1]}) was killed by SIGKILL" in last_words
    assert "Continue from the newest checkpoint with --resume auto." in last_words
    assert gone(workers)


def test_ranks_whose_launcher_is_killed_save_and_leave(tmp_path: Path) -> None:
    settings = dataclasses.replace(long_run(tmp_path), checkpoint_every=100_000)
    process = start(settings)
    wait_for_records(tmp_path, 3, process)
    workers = children_of(process.pid)
    process.kill()
    process.wait(PATIENCE_S)
    assert gone(workers)
    assert final_bits(tmp_path)["step"] >= 3


@pytest.mark.parametrize("words", [["--steps", "0"], ["--resume", "yes"], ["--task", "chess"], ["--nproc", "two"]])
def test_bad_settings_end_before_a_process_is_started(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from minddp.cli import main

    monkeypatch.setattr("minddp.tools.train.launch.launch", lambda *_: pytest.fail("a process was started"))
    try:
        status = main(["train", "--ddp", "torch", "--out", str(tmp_path), *words])
    except SystemExit as leaving:
        status = leaving.code
    assert status == 2
    assert words[0] in "".join(capsys.readouterr())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 75)])
def test_a_signal_of_a_batch_system_saves_and_asks_to_be_requeued(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    settings = dataclasses.replace(long_run(tmp_path), checkpoint_every=100_000)
    process = start(settings)
    wait_for_records(tmp_path, 3, process)
    process.send_signal(number)
    output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == status, output
    assert f"reason {number.name}" in output
    assert final_bits(tmp_path)["step"] >= 3


WARNS = """
import os, warnings
from minddp.tools.tasks import gpt

def task(**options):
    warnings.warn(f"this is rank {os.environ['RANK']}") if "RANK" in os.environ else None
    return gpt.task(**options)
"""


def test_a_warning_of_any_rank_is_shown_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "warns.py").write_text(WARNS)
    settings = tiny(tmp_path / "run", task=f"{tmp_path}/warns.py:task", steps=2)
    output = start(settings).communicate(timeout=PATIENCE_S)[0]
    for rank in (0, 1):
        assert re.search(rf"^rank {rank}: .*UserWarning: this is rank {rank}", output, re.MULTILINE), output


@pytest.mark.timeout(300)
def test_a_run_whose_ranks_are_killed_ends_with_the_same_bits(ranks, tmp_path: Path) -> None:
    """`python -m tests.tools.train.kills` does so with 50."""
    found = kill_at_random(tmp_path, num_kills=4, seed=0)
    assert found.kills >= 2
    assert found.starts[-1] > 0
    ranks(2).run(train_here, dataclasses.replace(found.settings, out=tmp_path / "whole", max_restarts=0))
    assert_same_bits(final_bits(found.settings.folder), final_bits(tmp_path / "whole"))
    whole = records(tmp_path / "whole", "training")
    assert records(found.settings.folder, "training") == whole
