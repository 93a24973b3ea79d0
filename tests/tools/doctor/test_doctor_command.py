"""The command as a user runs it, with real ranks. All runs start at once: they mostly import torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import partial

import pytest

from minddp.cli import main
from tests.tools.job.test_store_connection import free_port
from tests.tools.launch import jobs

# A rank that is killed in the middle of a measurement.
DIES = """
import os, signal, sys
from minddp.cli import main
from minddp.tools.doctor import doctor_command
measure = doctor_command.measure
def die(*arguments):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(*arguments)
doctor_command.measure = die
sys.exit(main(sys.argv[3:]))  # after -m minddp
"""


Runs = Mapping[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """`minddp doctor` on its own ranks, with an interface that does not exist, and with a rank that is killed."""
    by_hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dies = partial(jobs.start, "doctor", "--timeout-s", "20", launcher=(sys.executable, "-c", DIES), **by_hand)
    started = {
        "fine": jobs.start("doctor"),
        "wrong": jobs.start("doctor", GLOO_SOCKET_IFNAME="nosuch0"),
        "survivor": dies(RANK="0"),
        "victim": dies(RANK="1"),
    }
    return {name: jobs.end_of(process) for name, process in started.items()}


def test_two_ranks_of_their_own_go_through_every_check(runs: Runs) -> None:
    """The report is printed once; a note may be due to other programs."""
    assert runs["fine"].returncode == 0, runs["fine"].stdout
    lines = [line for line in runs["fine"].stdout.splitlines() if not line.startswith("        ")]
    checks = [line.split(maxsplit=1)[1].partition(":")[0] for line in lines]
    assert checks == ["rendezvous", "settings", "network", "link"]
    assert lines[0].startswith("fine    rendezvous: 2 ranks met at ")
    assert lines[2].startswith("fine    network: 2 ranks can connect, and their sum is right")


def test_a_broken_check_is_an_exit_status_and_no_traceback(runs: Runs) -> None:
    assert runs["wrong"].returncode == 1
    fact, remedy = runs["wrong"].stdout.splitlines()[-2:]
    assert fact.startswith("BROKEN  network: The process group failed: ")
    assert "nosuch0" in fact
    assert "gloo listens at no address on ranks 0 and 1." in fact
    assert "GLOO_SOCKET_IFNAME" in remedy
    said = runs["wrong"].stdout + runs["wrong"].stderr
    assert "Traceback" not in said
    assert "exit status" not in said


def test_a_rank_that_is_killed_while_measuring(runs: Runs) -> None:
    assert runs["survivor"].returncode == 1, runs["survivor"].stdout
    assert "BROKEN  network: The process group failed: " in runs["survivor"].stdout
    assert "no answer (" in runs["survivor"].stdout
    assert runs["victim"].stdout + runs["victim"].stderr == ""


def test_bad_settings_end_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("launch", "be_rank"):
        monkeypatch.setattr(f"minddp.tools.doctor.doctor_command.{name}", lambda *_: pytest.fail("it has started"))
    monkeypatch.setenv("RANK", "0")
    assert main(["doctor"]) == 2
    assert "its environment has RANK=0" in capsys.readouterr().err
