"""`minddp train --survive`, with real processes that die: the records and the checkpoint of an undisturbed run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import two_hosts, why_there_can_be_none
from minddp.tools.train.settings import Settings, SettingsError
from tests.tools.train.runs import assert_same_bits, command_line, final_bits, records, tiny, train_here

PATIENCE_S = 240.0


def settings_of(out: Path, **changes: Any) -> Settings:
    common = {
        "task": "tests.tools.train.mortal:task",
        "task_options": (),
        "steps": 12,
        "logical_ranks": 4,
        "log_every": 3,
    }
    return tiny(out, **common | {"log_every": 3, "validate_every": 4, "checkpoint_every": 5} | changes)


def start(settings: Settings, launcher: Sequence[str] = (), **plan: Any) -> subprocess.Popen[str]:
    """With `plan` for tests/tools/train/mortal.py, by `launcher` or the command itself."""
    env = {**os.environ, "MORTAL": json.dumps({"folder": str(settings.folder.parent), "deaths": [], **plan})}
    command = [*(launcher or [sys.executable]), "-m", "minddp", "train", *command_line(settings)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until(process: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end_of(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=PATIENCE_S)[0]
    finally:
        process.terminate()


def assert_undisturbed(ranks: Any, settings: Settings) -> None:
    whole = dataclasses.replace(settings, out=settings.folder.parent / "whole", survive=False, nproc=None)
    ranks(2).run(train_here, whole)
    assert_same_bits(final_bits(settings.folder), final_bits(whole.folder))
    for kind in ("training", "validation"):
        assert records(settings.folder, kind) == records(whole.folder, kind)


def sizes(folder: Path) -> list[int]:
    """Of the groups that have computed, one after another."""
    return [event["ranks"] for event in records(folder, "event") if event["what"] in ("start", "generation")]


def test_ranks_die_in_a_step_between_steps_and_while_they_write_a_checkpoint(ranks, tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "run", nproc=4, survive=True)
    deaths = [(4, 2, "training", 2), (3, 0, "validation", 1), (2, 0, "checkpoint", 2)]
    output = end_of(start(settings, deaths=deaths))
    assert sizes(settings.folder) == [4, 3, 2, 1], output
    assert_undisturbed(ranks, settings)


def test_a_rank_that_is_started_again_is_taken_back(ranks, tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "run", nproc=3, survive=True, max_restarts=1)
    death, wait_at = (3, 0, "training", 8), (2, 0, "training", 5)
    process = start(settings, deaths=[death], wait_at=wait_at)
    output = end_of(process)
    assert process.returncode == 0, output
    assert sizes(settings.folder) == [3, 2, 3], output
    assert_undisturbed(ranks, settings)


@pytest.mark.slow
def test_if_all_ranks_die_at_once_those_that_are_started_again_continue_from_the_checkpoint(
    ranks, tmp_path
) -> None:
    settings = settings_of(tmp_path / "run", nproc=2, survive=True, max_restarts=1)
    output = end_of(start(settings, deaths=[(2, 0, "training", 13), (2, 1, "training", 13)]))
    starts = [event["step"] for event in records(settings.folder, "event") if event["what"] == "start"]
    assert (starts[0], starts[-1]) == (0, 5), output
    assert_undisturbed(ranks, settings)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(ranks, tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "run", nproc=2, survive=True, steps=100_000, schedule="constant")
    process = start(settings)
    wait_until(process, lambda: len(records(settings.folder, "training")) >= 3)
    process.send_signal(signal.SIGTERM)
    assert "Stopped by SIGTERM after step" in end_of(process)
    assert process.returncode == 128 + signal.SIGTERM
    settings = dataclasses.replace(settings, steps=final_bits(settings.folder)["step"] + 10, resume="yes")
    output = end_of(start(settings))
    assert "Finished after" in output
    whole = dataclasses.replace(settings, out=tmp_path / "whole", survive=False, nproc=None, resume="no")
    ranks(2).run(train_here, whole)
    assert_same_bits(final_bits(settings.folder), final_bits(whole.folder))


@pytest.mark.parametrize("changes", [{"logical_ranks": None}, {"zero": True}, {"device": "cuda"}, {"xray": "1:2"}])
def test_what_cannot_survive_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    settings_of(tmp_path, survive=True)
    with pytest.raises(SettingsError, match="--survive needs --logical-ranks and the CPU"):
        settings_of(tmp_path, survive=True, **changes)


obstacle = why_there_can_be_none()


@pytest.mark.slow
@pytest.mark.skipif(obstacle is not None, reason=f"no network namespaces here: {obstacle}")
def test_one_of_two_hosts_is_taken_away(ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its cable: its processes still run, and are silent. The store is on the other one; no disk is shared."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    here = settings_of(tmp_path / "here", survive=True, nproc=1, steps=24, resume="auto")
    there = dataclasses.replace(here, out=tmp_path / "there")
    with two_hosts("10gbit") as (first, second):
        inside = [["ip", "netns", "exec", host.namespace, sys.executable] for host in (first, second)]
        elastic = ["-m", "minddp.elastic", "--nproc", "1", "--store", f"{first.address}:29511"]
        # The first rank waits in its second step for the other one, which comes second, and later cuts the cable.
        left = start(here, [*inside[0], *elastic], wait_at=(1, 0, "training", 10))
        wait_until(left, lambda: sizes(here.folder) == [1])
        taken = start(there, [*inside[1], *elastic, "--join"], cut_at=(2, 1, "training", 9))
        try:
            output = end_of(left)
        finally:
            found = subprocess.run(["ip", "netns", "pids", second.namespace], capture_output=True, text=True)
            for pid in map(int, found.stdout.split()):
                os.kill(pid, signal.SIGKILL)
            taken.communicate(timeout=PATIENCE_S)
    assert left.returncode == 0, output
    assert sizes(here.folder) == [1, 2, 1], output
    assert_undisturbed(ranks, here)
