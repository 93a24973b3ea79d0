"""Ranks that end well, fail, are killed or are stopped, under torch's launcher."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from minddp.tools.job.launcher import RanksFailed, launch, ranks_failed

PATIENCE_S = 240.0

# A rank: leaves a file with its place in the job, then does what its environment says.
RANK = """
import os, pathlib, signal, sys, time
folder, act, rank = pathlib.Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
part = folder / f"{rank}.part"
part.write_text(f"{rank} {os.environ['WORLD_SIZE']} {os.environ['LOCAL_RANK']}")
part.rename(folder / rank)
if act == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if act == "fails" and rank == "1":
    sys.exit(3)
if act != "ends":
    time.sleep(60)
"""

LAUNCHER = """
import sys
from minddp.tools.job.launcher import Stopped, launch
try:
    launch(2, "launched_rank", sys.argv[1:])
except Stopped as stopped:
    print(stopped)
    sys.exit(128 + stopped.signal_number)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which ranks find their module, `launched_rank`."""
    (tmp_path / "launched_rank.py").write_text(RANK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def test_every_rank_has_its_place_in_the_environment(folder: Path) -> None:
    launch(2, "launched_rank", [str(folder), "ends"])
    assert [(folder / str(rank)).read_text() for rank in range(2)] == ["0 2 0", "1 2 1"]


@pytest.mark.parametrize(
    ("act", "says"), [("killed", r"was killed by SIGKILL"), ("fails", r"failed with exit status 3")]
)
def test_a_rank_that_ends_badly_is_named(folder: Path, act: str, says: str) -> None:
    with pytest.raises(RanksFailed, match=rf"^Rank 1 \(pid \d+\) {says}"):
        launch(2, "launched_rank", [str(folder), act])


def test_a_signal_ends_the_ranks(folder: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(folder), "sleeps"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + PATIENCE_S
    while not ((folder / "0").exists() and (folder / "1").exists()):
        assert time.monotonic() < deadline, "the ranks do not start"
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S)[0] == "Stopped by SIGINT.\n"
    assert process.returncode == 128 + signal.SIGINT


def failures(*ends: tuple[int, int]) -> ChildFailedError:
    """The launcher's report on ranks 0, 1, ... with pids 70, 71, ..., each with its exit status and time."""
    found = {}
    for rank, (exitcode, timestamp) in enumerate(ends):
        found[rank] = ProcessFailure(local_rank=rank, pid=70 + rank, exitcode=exitcode, error_file="")
        found[rank].timestamp = timestamp
    return ChildFailedError("minddp", found)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        # A killed rank makes the others fail.
        ([(1, 100), (-signal.SIGKILL, 100)], "Rank 1 (pid 71) was killed by SIGKILL."),
        # A failed rank has the others terminated.
        ([(-signal.SIGTERM, 100), (3, 100)], "Rank 1 (pid 71) failed with exit status 3; its error is above."),
        # One waits for the other, which the launcher kills after its grace period.
        ([(-signal.SIGKILL, 130), (1, 100)], "Rank 1 (pid 71) failed with exit status 1; its error is above."),
    ],
)
def test_the_failure_to_look_at_first(ends: list[tuple[int, int]], says: str) -> None:
    assert str(ranks_failed(failures(*ends))) == says
