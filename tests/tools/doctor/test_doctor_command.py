"""The command as a user runs it, with real ranks. All runs start at once: they mostly import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from minddp.cli import main
from minddp.tools.job.place import OF_A_RANK
from tests.tools.job.test_store_connection import free_port

PATIENCE_S = 240.0

# A rank that is killed in the middle of a measurement.
DIES = """
import os, signal, sys
from minddp.cli import main
from minddp.tools.doctor import examination
measure = examination.measure
def die(*arguments):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(*arguments)
examination.measure = die
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


class Run(NamedTuple):
    status: int
    output: str


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Run]]:
    """`minddp doctor` on its own ranks, with an interface that does not exist, and with a rank that is killed."""
    doctor = [sys.executable, "-m", "minddp", "doctor"]
    dies = [sys.executable, "-c", DIES, "--timeout-s", "20"]
    by_hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        "fine": (doctor, {}),
        "wrong": (doctor, {"GLOO_SOCKET_IFNAME": "nosuch0"}),
        "survivor": (dies, {"RANK": "0", **by_hand}),
        "victim": (dies, {"RANK": "1", **by_hand}),
    }
    inherited = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = {
        name: subprocess.Popen(command, env={**inherited, **environment}, **pipes)
        for name, (command, environment) in commands.items()
    }
    outputs = {name: process.communicate(timeout=PATIENCE_S)[0] for name, process in started.items()}
    yield {name: Run(process.returncode, outputs[name]) for name, process in started.items()}
    for process in started.values():
        process.kill()


def test_two_ranks_of_their_own_go_through_every_check(runs: dict[str, Run]) -> None:
    """The report is printed once; a note may be due to other programs."""
    assert runs["fine"].status == 0, runs["fine"].output
    lines = [line for line in runs["fine"].output.splitlines() if not line.startswith("        ")]
    checks = [line.split(maxsplit=1)[1].partition(":")[0] for line in lines]
    assert checks == ["rendezvous", "settings", "network", "link"]
    assert lines[0].startswith("fine    rendezvous: 2 ranks met at ")
    assert lines[2].startswith("fine    network: 2 ranks can connect, and their sum is right")


def test_a_broken_check_is_an_exit_status_and_no_traceback(runs: dict[str, Run]) -> None:
    assert runs["wrong"].status == 1
    fact, remedy = runs["wrong"].output.splitlines()[-2:]
    assert fact.startswith("BROKEN  network: The process group failed: ")
    assert "nosuch0" in fact
    assert "gloo listens at no address on ranks 0 and 1." in fact
    assert "GLOO_SOCKET_IFNAME" in remedy
    assert "Traceback" not in runs["wrong"].output
    assert "exit status" not in runs["wrong"].output


def test_a_rank_that_is_killed_while_measuring(runs: dict[str, Run]) -> None:
    assert runs["survivor"].status == 1, runs["survivor"].output
    assert "BROKEN  network: The process group failed: " in runs["survivor"].output
    assert "no answer (" in runs["survivor"].output
    assert runs["victim"].output == ""


def test_bad_settings_end_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("launch", "be_rank"):
        monkeypatch.setattr(f"minddp.tools.doctor.doctor_command.{name}", lambda *_: pytest.fail("it has started"))
    monkeypatch.setenv("RANK", "0")
    assert main(["doctor"]) == 2
    assert "its environment has RANK=0" in capsys.readouterr().err
