from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO
from unittest import mock

import pytest
import torch

from minddp.tools.train.checkpoint import DAMAGES, CheckpointFiles, load, write_atomically
from minddp.tools.train.settings import RunError
from tests.tools.train.runs import assert_same_bits

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


def test_a_disk_that_is_full_ends_the_run_and_leaves_what_there_was(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=2)
    files.write({"step": 5})

    def save(state: object, file: IO[bytes]) -> None:
        file.write(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in (5, 10):
        with mock.patch.object(torch, "save", save):
            with pytest.raises(RunError, match=r"Cannot write a checkpoint .*No space left on device"):
                files.write({"step": step})
    assert [path.name for path in files.folder.iterdir()] == ["step-00000005.pt"]
    assert files.newest() == {"step": 5}


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = CheckpointFiles(tmp_path, keep=2)
    for step in (3, 5):
        files.write({"step": step})
    newest, _ = files.paths()
    newest.write_bytes(newest.read_bytes()[:-1])
    found = files.newest()
    assert found == {"step": 3}
    assert f"{newest} is skipped: " in caplog.text


def test_a_change_of_any_byte_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    """Some bytes are padding."""
    files, state, noticed = CheckpointFiles(tmp_path, keep=2), {"step": 3, "weights": torch.arange(10.0)}, 0
    files.write(state)
    (path,) = files.paths()
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert_same_bits(load(path), state)
        except DAMAGES:
            noticed += 1
    assert noticed > 10


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, keep=2)
    for step in range(5):
        files.write({"step": step})
    assert [load(path)["step"] for path in files.paths()] == [4, 3]
