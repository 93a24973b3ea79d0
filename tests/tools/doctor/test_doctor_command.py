"""The command as a user runs it, with real ranks. All runs start at once: they mostly import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

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


class Runs:
    """`minddp doctor` on its own ranks, with an interface that does not exist, and with a rank that is killed."""

    def __init__(self) -> None:
        doctor = [sys.executable, "-m", "minddp", "doctor"]
        by_hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        dies = [sys.executable, "-c", DIES, "--timeout-s", "20"]
        self._started = {
            "fine": self._start(doctor),
            "wrong": self._start(doctor, GLOO_SOCKET_IFNAME="nosuch0"),
            "survivor": self._start(dies, RANK="0", **by_hand),
            "victim": self._start(dies, RANK="1", **by_hand),
        }
        self.status: dict[str, int] = {}
        self.output: dict[str, str] = {}
        for name, process in self._started.items():
            self.output[name] = process.communicate(timeout=PATIENCE_S)[0]
            self.status[name] = process.returncode

    def _start(self, command: list[str], **environment: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
        return subprocess.Popen(
            command,
            env={**inherited, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def close(self) -> None:
        for process in self._started.values():
            process.kill()


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    made = Runs()
    yield made
    made.close()


def test_two_ranks_of_their_own_go_through_every_check(runs: Runs) -> None:
    """The report is printed once; a note may be due to other programs."""
    assert runs.status["fine"] == 0, runs.output["fine"]
    lines = [line for line in runs.output["fine"].splitlines() if not line.startswith("        ")]
    checks = [line.split(maxsplit=1)[1].partition(":")[0] for line in lines]
    assert checks == ["rendezvous", "settings", "network", "link"]
    assert lines[0].startswith("fine    rendezvous: 2 ranks met at ")
    assert lines[2].startswith("fine    network: 2 ranks can connect, and their sum is right")


def test_a_broken_check_is_an_exit_status_and_no_traceback(runs: Runs) -> None:
    assert runs.status["wrong"] == 1
    fact, remedy = runs.output["wrong"].splitlines()[-2:]
    assert fact.startswith("BROKEN  network: The process group failed: ")
    assert "nosuch0" in fact
    assert "gloo listens at no address on ranks 0 and 1." in fact
    assert "GLOO_SOCKET_IFNAME" in remedy
    assert "Traceback" not in runs.output["wrong"]
    assert "exit status" not in runs.output["wrong"]


def test_a_rank_that_is_killed_while_measuring(runs: Runs) -> None:
    assert runs.status["survivor"] == 1, runs.output["survivor"]
    assert "BROKEN  network: The process group failed: " in runs.output["survivor"]
    assert "no answer (" in runs.output["survivor"]
    assert runs.output["victim"] == ""


def test_bad_settings_end_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("launch", "be_rank"):
        monkeypatch.setattr(f"minddp.tools.doctor.doctor_command.{name}", lambda *_: pytest.fail("it has started"))
    monkeypatch.setenv("RANK", "0")
    assert main(["doctor"]) == 2
    assert "its environment has RANK=0" in capsys.readouterr().err
