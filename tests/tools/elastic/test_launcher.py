"""The launcher and the store that it holds; tests/tools/elastic/test_survival.py starts one for a training."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from minddp.tools.elastic import launcher

RANK = """
import os, sys, time
import torch.distributed as dist
host, _, port = os.environ["MINDDP_ELASTIC_STORE"].rpartition(":")
store = dist.TCPStore(host, int(port), is_master=False)
store.set(sys.argv[1], "")
store.wait(["first", "second"])  # both hosts have started
time.sleep(float(sys.argv[2]))
store.set("finished", "")
"""


@pytest.mark.parametrize(
    ("options", "name_server", "status"),
    [([], "attempts:0", 0), (["--join", "--store", "there:1"], "timeout:2", 1)],
)
def test_the_store(
    options: list[str],
    name_server: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its server asks no name server, since all ranks wait while it does. On another host it may have ended."""
    found: list[str | None] = []

    class Store:
        port = 1

        def __init__(self, *_: Any, **__: Any) -> None:
            found.append(os.environ.get("RES_OPTIONS"))

        def add(self, _key: str, _number: int) -> int:
            return 0

        def check(self, _keys: list[str]) -> bool:
            if status:
                raise RuntimeError("Connection reset by peer")
            return True

    monkeypatch.setattr(dist, "TCPStore", Store)
    monkeypatch.setattr(launcher, "run_ranks", lambda *_: 0)
    monkeypatch.setenv("RES_OPTIONS", "timeout:2")
    assert launcher.main([*options, "script.py"]) == status
    assert found == [name_server]
    assert ("the store has ended, and with it the job" in capsys.readouterr().err) == bool(status)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0", "script.py"], "--nproc of 1 or more"),
        (["--store", "there", "script.py"], "argument --store: invalid address value: 'there'"),
        (["--join", "script.py"], "with --join also a --store"),
        ([], "Name a script"),
    ],
)
def test_mistakes_are_reported(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launcher.main(arguments)
    assert message in capsys.readouterr().err


def test_the_store_is_held_until_the_launcher_on_another_host_has_ended(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "minddp.elastic", "--nproc", "1", "--max-restarts", "0"]
    command += ["--store", f"localhost:{port}"]
    hosts = [
        subprocess.Popen([*command, *options], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for options in (["rank.py", "first", "0"], ["--join", "rank.py", "second", "3"])
    ]
    errors = [host.communicate(timeout=240)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], errors
