"""Ranks that did not meet, and why."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from minddp.doctor.findings import Verdict
from minddp.doctor.meeting import Attempt, Obstacle
from minddp.doctor.place import Place
from minddp.doctor.verdicts.meeting import judge_attempt, judge_roll_call
from tests.doctor.made_up import job, rank, rank_on

PLACE = Place(1, 2, "node1", 29500)
HERE = {"eth0": "10.0.0.2"}


def attempt(obstacle: Obstacle, **changed: Any) -> Attempt:
    made = Attempt(PLACE, obstacle, "what the system said", ("10.0.0.1",), 30.0)
    return dataclasses.replace(made, **changed)


@pytest.mark.parametrize("obstacle", get_args(Obstacle))
def test_every_obstacle_has_a_text_and_a_remedy(obstacle: Obstacle) -> None:
    found = judge_attempt(attempt(obstacle), HERE)
    assert found.verdict is Verdict.BROKEN
    assert "29500" in found.fact or "node1" in found.fact
    assert found.remedy


def test_address_port_and_what_the_name_leads_to_are_named() -> None:
    assert "node1:29500 (10.0.0.1) does not answer, for 30 s" in judge_attempt(attempt("no answer"), HERE).fact


def test_a_name_that_leads_to_the_host_itself() -> None:
    found = judge_attempt(attempt("refused", resolved=("127.0.1.1",)), HERE)
    assert "node1 leads to this host itself" in found.remedy


def test_rank_0_is_told_when_the_address_is_not_its_own() -> None:
    first = dataclasses.replace(PLACE, rank=0)
    found = judge_attempt(attempt("refused", place=first), HERE)
    assert "Rank 0 is on this host, whose addresses are 10.0.0.2 (eth0)." in found.fact
    assert "MASTER_ADDR has to be an address of the host that rank 0 is on" in found.remedy
    own = judge_attempt(attempt("refused", place=first, resolved=("10.0.0.2",)), HERE)
    assert "Rank 0 is on this host" not in own.fact


def roll_call(facts: Any, **changed: Any) -> Any:
    told = {"duplicates": [], "took_s": 0.25, "timeout_s": 30.0, **changed}
    return judge_roll_call(dataclasses.replace(PLACE, rank=0, world_size=3), facts, **told)


def test_all_came() -> None:
    found = roll_call(job(rank(0), rank(1), rank_on(2, "b", "10.0.0.3")))
    assert found.verdict is Verdict.FINE
    assert found.fact == "3 ranks on 2 hosts met at node1:29500 (10.0.0.1, eth0) in 0.2 s."


def test_who_did_not_come_is_named_with_who_did() -> None:
    found = roll_call({1: rank_on(1, "b", "10.0.0.2")})
    assert found.verdict is Verdict.BROKEN
    assert found.fact == ("Ranks 0, 2 have not come within 30 s. 1 of 3 ranks met at node1:29500: rank 1 on b.")
    assert "WORLD_SIZE=3 MASTER_ADDR=node1 MASTER_PORT=29500" in found.remedy


def test_two_processes_of_one_rank() -> None:
    found = roll_call(job(rank(0), rank(1), rank(2)), duplicates=[1])
    assert found.verdict is Verdict.BROKEN
    assert "Several processes claim to be rank 1." in found.fact


def test_ranks_that_do_not_agree_on_how_many_they_are() -> None:
    facts = job(rank(0), rank(1), rank(2))
    found = roll_call({**facts, 2: dataclasses.replace(facts[2], world_size=8)})
    assert found.verdict is Verdict.BROKEN
    assert "3 according to ranks 0, 1, 8 according to rank 2" in found.fact
