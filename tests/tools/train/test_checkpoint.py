from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from minddp.tools.train.checkpoint import (
    CheckpointFiles,
    Damaged,
    load,
    write_atomically,
)
from minddp.tools.train.settings import RunError

# Writes half of the new content, says so, and waits to be killed.
WRITER = """
import sys, time
from pathlib import Path
from minddp.tools.train.checkpoint import write_atomically

def half(file):
    file.write(b"new" * 100_000)
    file.flush()
    print("half written", flush=True)
    time.sleep(60)

write_atomically(Path(sys.argv[1]), half)
"""


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_writer_killed_in_mid_write_leaves_the_old_file_or_none(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "checkpoint.pt"
    if before is not None:
        path.write_bytes(before)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half written\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait(60)
    assert (path.read_bytes() if path.exists() else None) == before

    write_atomically(path, lambda file: file.write(b"whole"))  # the file that the killed writer left is no obstacle
    assert path.read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_the_bytes_are_on_the_disk_before_they_get_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    write_atomically(tmp_path / "x", lambda file: file.write(b"x"))
    assert calls == ["fsync", "replace", "fsync"]  # the file, the name, the folder


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail(file: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert os.listdir(tmp_path) == ["x"]
    assert path.read_bytes() == b"old"


def test_a_full_disk_is_named_though_torch_says_something_else(tmp_path: Path) -> None:
    state = {"weights": torch.zeros(100_000)}
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space left on device"):
        write_atomically(tmp_path / "x", lambda file: torch.save(state, full))
    assert os.listdir(tmp_path) == []


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = CheckpointFiles(tmp_path, keep=2)
    for step in (3, 5):
        files.write({"step": step}, is_best=False)
    newest, before = files.paths()
    newest.write_bytes(newest.read_bytes()[:-1])
    found = files.newest()
    assert found == (before, {"step": 3})
    assert f"{newest} is skipped: its bytes have changed since it was written" in caplog.text


def test_a_change_of_any_byte_is_noticed(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=2)
    files.write({"step": 3, "weights": torch.arange(10.0)}, is_best=False)
    (path,) = files.paths()
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(Damaged, match="have changed since"):
            load(path)
    path.write_bytes(whole)
    assert load(path)["weights"].tolist() == list(range(10))


def test_the_last_few_and_the_best_are_kept(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=2)
    for step in range(5):
        files.write({"step": step}, is_best=step == 1)
    assert [load(path)["step"] for path in files.paths()] == [4, 3]
    assert load(tmp_path / "checkpoints" / "best.pt")["step"] == 1
    files.discard()
    assert list(files.folder.iterdir()) == []


def test_what_is_written_in_the_background_is_the_state_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, may_write = CheckpointFiles(tmp_path, keep=1), threading.Event()
    write = files.write
    monkeypatch.setattr(files, "write", lambda *a, **kw: (may_write.wait(30), write(*a, **kw)))
    weights = torch.zeros(1000)
    files.save({"step": 1, "weights": weights}, is_best=False)
    weights += 1
    may_write.set()
    files.wait()
    assert not load(files.paths()[0])["weights"].any()


def test_a_failed_checkpoint_raises_nothing(tmp_path: Path) -> None:
    """Only rank 0 writes: an error there would leave the other ranks waiting."""
    (tmp_path / "checkpoints").write_text("in the way")
    files = CheckpointFiles(tmp_path, keep=1)
    for step in (1, 2):
        files.save({"step": step}, is_best=False)
    assert isinstance(files.failure, RunError)
    assert "Cannot write a checkpoint" in str(files.failure)
