"""Trainings in which ranks die, stop and come back. Each ends with the bits of an undisturbed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tools.elastic.job import Job, digests
from tests.tools.elastic.survivor import undisturbed


def fault(member: int, moment: str, step: int = 0, signal: str = "SIGKILL") -> dict[str, Any]:
    return {"member": member, "moment": moment, "step": step, "signal": signal}


def train(num_ranks: int, *faults: dict[str, Any], restarts: int = 0, limit_s: float = 60.0, **plan: Any) -> Any:
    """The events; all ranks that have come to the end have the undisturbed bits, and none has failed."""
    job = Job(num_ranks, restarts, faults=faults, **plan)
    events = job.wait(limit_s)
    assert not job.failures(), job.account()
    assert set(digests(events)) == {undisturbed(job.plan["steps"])}, job.account()
    return events


def of(events: Any, kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


@pytest.mark.parametrize("moment", ["backward", "vote", "after vote", "forward", "buffers", "end of step"])
def test_a_rank_dies_in_a_step(moment: str) -> None:
    """The loss is noticed without a time limit: all are 60 s or more."""
    events = train(4, fault(2, moment, 5))
    assert len(digests(events)) == 3
    assert len(of(events, "fault")) == 1
    counted = [(event["member"], event["step"]) for event in of(events, "step")]
    assert len(counted) == len(set(counted)), "a step has counted twice"


@pytest.mark.parametrize("moment", ["move", "receive", "construction", "after construction", "after move"])
def test_ranks_die_while_the_others_come_together(moment: str) -> None:
    assert len(digests(train(3, fault(1, moment)))) == 2


#: The faults, what is special in the plan, and how many of the ranks are left.
FAULTS: dict[str, tuple[int, list[dict[str, Any]], dict[str, Any], int]] = {
    # Torch counts the groups of a process, also those not made, and has the number in the store's keys.
    "an attempt to connect fails on one rank only": (
        3,
        [fault(2, "construction", 0, "failed attempt")],
        {"connect_limit_s": 600.0},
        3,
    ),
    # One rank has not got the averages, and the others have: all compute the step again.
    "a connection is lost and no rank": (3, [fault(2, "vote", 5, "stuck")], {}, 3),
    "two die at once and another one while the rest regroups": (
        4,
        [fault(1, "backward", 5), fault(2, "backward", 5), fault(3, "regroup", 5)],
        {},
        1,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_those_that_are_left_go_on(name: str) -> None:
    num_ranks, faults, plan, left = FAULTS[name]
    events = train(num_ranks, *faults, **plan)
    assert len(digests(events)) == left
    assert of(events, "step")[-1]["world"] == left


def test_what_has_died_is_started_again_gets_its_state_from_the_living_and_leaves_nothing_behind() -> None:
    def shared_memory() -> set[str]:
        """But for the semaphores of other tests that run meanwhile: a rank has none."""
        return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}

    before = shared_memory()
    events = train(3, fault(2, "backward", 4), restarts=1, steps=20, hold=10, until_members=3)
    assert shared_memory() <= before
    assert len(digests(events)) == of(events, "step")[-1]["world"] == 3
    first, *_, last = of_the_new = [event["step"] for event in of(events, "step") if event["member"] == 4]
    assert of_the_new == list(range(first, 20))
    assert 4 < first <= 11 < last, "asked to join by step 10, so it takes part from the next one on"
    [by_world] = [event["threads"] for event in of(events, "end") if event["member"] == 1]
    assert by_world["3"] <= by_world["2"] + 6, "generations leave threads behind"


def test_a_source_dies_while_a_new_rank_receives_its_state() -> None:
    when_it_has_come = [fault(1, "receive", step) for step in (3, 4, 5)]
    faults = [fault(3, "forward", 3), *when_it_has_come]
    events = train(3, *faults, restarts=2, steps=20, hold=5, until_members=3)
    assert [event["moment"] for event in of(events, "fault")] == ["forward", "receive"]


def test_a_process_that_comes_too_late_says_so_and_ends_in_order() -> None:
    job = Job(1)
    job.wait()
    late = job.start()
    job.wait()
    assert late.exitcode == 0
    assert "had finished" in job.account()


def test_an_error_of_the_script_is_no_loss() -> None:
    """The others do not wait for the process to end, either."""
    job = Job(2, faults=[fault(1, "forward", 3, "error")], lingers=True)
    job.wait_for(digests)
    limit = time.monotonic() + 30
    while len(job.alive()) > 1 and time.monotonic() < limit:  # the one that is done takes a moment to end
        time.sleep(0.05)
    assert len(job.alive()) == 1
    Path(job.folder.name, "go").touch()
    events = job.wait()
    assert sorted(process.exitcode for process in job.processes) == [0, 1]
    assert "a mistake" in job.account()
    assert set(digests(events)) == {undisturbed(12)}


@pytest.mark.timeout(900)  # a bound for a machine with many other jobs: it ends when no step is made for a minute
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_ten_kills_at_random(transport: str) -> None:
    from tests.tools.elastic.chaos import kill_at_random

    report = kill_at_random(num_kills=10, num_ranks=4, seed=1, transport=transport, every_steps=5.0)
    assert len(report.losses) == 10
    assert not report.failures, report
    assert report.is_undisturbed, report


def test_torchs_agents_start_what_dies_again(tmp_path: Path) -> None:
    plan = json.dumps({"folder": str(tmp_path), "steps": 400, "share_s": 0.01, "faults": [fault(2, "forward", 3)]})
    command = [sys.executable, "-m", "minddp", "elastic", "--nproc", "2", "-m", "tests.tools.elastic.survivor"]
    done = subprocess.run(command, env={**os.environ, "PLAN": plan}, timeout=240, check=False)
    assert done.returncode == 0
    ends = [line for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines() if '"end"' in line]
    assert [json.loads(line)["digest"] for line in ends] == [undisturbed(400)] * 2
