"""Whole runs, started as a user starts them: `minddp train` and torchrun, Ctrl-C and killed processes."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minddp.tools.train.settings import Settings
from tests.tools.train.kills import kill_at_random
from tests.tools.train.runs import (
    assert_same_bits,
    children_of,
    end_of,
    final_bits,
    records,
    start,
    tiny,
    train_here,
    wait_for_records,
)


def long_run(out: Path) -> Settings:
    """A run that is still going when a signal comes, however late. What is learned does not depend on its end."""
    return tiny(
        out, ddp="torch", steps=100_000, schedule="constant", validate_every=100_000, checkpoint_every=50, threads=1
    )


def ended_by(settings: Settings, count: int, act: Callable[[Any, list[int]], object]) -> tuple[int, str, list[int]]:
    """The status and output of a run in which `act` is done to the launcher and its ranks; all are gone then.

    It is done after `count` records.
    """
    process = start(settings)
    wait_for_records(settings.folder, count, process)
    workers = children_of(process)
    assert len(workers) == 2
    act(process, workers)
    (status,), output = end_of(process)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.05)
    return status, output, workers


def test_ctrl_c_then_resumed_under_torchrun_ends_with_the_same_bits(ranks, tmp_path: Path) -> None:
    settings = long_run(tmp_path / "broken")
    status, output, _ = ended_by(settings, 5, lambda launcher, _: launcher.send_signal(signal.SIGINT))
    assert status == 128 + signal.SIGINT, output
    assert "reason SIGINT" in output
    stopped_at = final_bits(settings.folder)["step"]
    assert stopped_at >= 5

    settings = dataclasses.replace(settings, steps=stopped_at + 20)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    statuses, output = end_of(start(dataclasses.replace(settings, resume="auto"), *torchrun))
    assert statuses == [0], output

    whole = dataclasses.replace(settings, out=tmp_path / "whole")
    ranks(2).run(train_here, whole)
    assert_same_bits(final_bits(settings.folder), final_bits(whole.folder))
    assert records(settings.folder, "training") == records(whole.folder, "training")


def test_a_killed_rank_ends_the_job_with_an_error_that_names_it(tmp_path: Path) -> None:
    settings = dataclasses.replace(long_run(tmp_path), checkpoint_every=3)
    status, output, workers = ended_by(settings, 10, lambda _, workers: os.kill(workers[1], signal.SIGKILL))
    assert status == 1, output
    last_words = output.strip().splitlines()[-1]
    assert f"Rank 1 (pid {workers[1]}) was killed by SIGKILL" in last_words
    assert "Continue from the newest checkpoint with --resume auto." in last_words


@pytest.mark.parametrize(
    ("number", "status", "reason"),
    [(signal.SIGUSR1, 75, "SIGUSR1"), (signal.SIGTERM, 75, "SIGTERM"), (signal.SIGKILL, -signal.SIGKILL, "SIGHUP")],
)
def test_a_signal_to_the_launcher_has_its_ranks_save_and_leave(
    tmp_path: Path, number: signal.Signals, status: int, reason: str
) -> None:
    """A batch system's asks to be requeued; ranks whose launcher is killed leave, too."""
    settings = dataclasses.replace(long_run(tmp_path), checkpoint_every=100_000)
    found, output, _ = ended_by(settings, 3, lambda launcher, _: launcher.send_signal(number))
    assert found == status, output
    assert f"reason {reason}" in output
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
    _, output = end_of(start(settings))
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
