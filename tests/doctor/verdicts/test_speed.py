"""What is made of measured times."""

from __future__ import annotations

import pytest

from minddp.doctor.board import Outcome
from minddp.doctor.findings import Verdict
from minddp.doctor.fit import Reading
from minddp.doctor.verdicts.speed import (
    judge_clocks,
    judge_curves,
    judge_failure,
    judge_step,
    judge_stragglers,
    slowest,
)
from tests.doctor.made_up import job, rank, rank_on, told, verdicts

TWO_HOSTS = job(rank_on(0, "a", "10.0.0.1"), rank_on(1, "b", "10.0.0.2"))
SIZES = (4096, 65536, 2**20, 2**24)


def curve(latency_s: float, bytes_per_s: float) -> dict[int, float]:
    return {nbytes: latency_s + nbytes / bytes_per_s for nbytes in SIZES}


@pytest.mark.parametrize(
    ("ahead_s", "verdict", "words"),
    [
        (0.2, Verdict.FINE, "agree within 0.21 s"),
        (90.0, Verdict.NOTE, "The clock of b is 90.0 s ahead of that of a."),
        (-90.0, Verdict.NOTE, "The clock of b is 90.0 s behind that of a."),
    ],
)
def test_clocks(ahead_s: float, verdict: Verdict, words: str) -> None:
    readings = {0: [Reading(10.0, 10.01)], 1: [Reading(10.0 + ahead_s, 10.01 + ahead_s)]}
    found = judge_clocks(TWO_HOSTS, readings)
    assert found.verdict is verdict
    assert words in found.fact


def test_a_difference_that_cannot_be_told_from_a_slow_network_is_no_difference() -> None:
    readings = {0: [Reading(10.0, 14.0)], 1: [Reading(12.0, 16.0)]}
    assert judge_clocks(TWO_HOSTS, readings).verdict is Verdict.FINE


def test_ranks_of_one_machine_have_one_clock() -> None:
    readings = {0: [Reading(10.0, 10.1)], 1: [Reading(99.0, 99.1)]}
    assert judge_clocks(job(rank(0), rank(1)), readings).fact == "All ranks read the same clock."


def test_the_slowest_rank_counts() -> None:
    assert slowest([[[4096, 1.0], [65536, 5.0]], [[4096, 2.0], [65536, 4.0]]]) == {4096: 2.0, 65536: 5.0}


def test_a_fast_network_in_terms_of_a_model() -> None:
    curves = {"all-reduce, gloo": curve(1e-4, 2e9), "broadcast, gloo": curve(1e-4, 4e9)}
    (found,) = judge_curves(curves, "", is_busy=False)
    assert found.verdict is Verdict.FINE
    assert found.fact == "To average 25 million float32 gradients takes 51 ms by gloo."


@pytest.mark.parametrize(
    "slow", [curve(1e-4, 50e6), curve(20e-3, 2e9), {4096: 3.0}], ids=["bandwidth", "latency", "one message"]
)
def test_a_slow_network(slow: dict[int, float]) -> None:
    found = judge_curves({"all-reduce, gloo": slow}, "", is_busy=False)
    assert verdicts(found) == [Verdict.NOTE, Verdict.FINE]
    assert "all-reduce, gloo is slow" in found[0].fact
    assert "fastest network" in found[0].remedy


def test_on_a_busy_machine_the_network_is_not_blamed() -> None:
    slow, steps = (
        curve(20e-3, 50e6),
        {rank: {"together": 0.05, "alone": 0.01, "parameters": 8e5} for rank in (0, 1)},
    )
    found = [*judge_curves({"all-reduce, gloo": slow}, "", is_busy=True), judge_step(steps, is_busy=True)]
    assert verdicts(found) == [Verdict.NOTE, Verdict.FINE, Verdict.NOTE]
    for finding in (found[0], found[2]):
        assert finding.remedy.startswith("The machine is busy, see load, so this says nothing of the network.")


def test_why_memory_is_not_shared() -> None:
    found = judge_curves({"all-reduce, gloo": curve(1e-4, 2e9)}, "this system has no memfd_create", is_busy=False)
    assert verdicts(found) == [Verdict.FINE, Verdict.NOTE]
    assert "no memfd_create" in found[1].fact


@pytest.mark.parametrize(("together_s", "verdict"), [(0.02, Verdict.FINE), (0.05, Verdict.NOTE)])
def test_a_step(together_s: float, verdict: Verdict) -> None:
    steps = {number: {"together": together_s, "alone": 0.01, "parameters": 8e5} for number in range(2)}
    found = judge_step(steps, is_busy=False)
    assert found.verdict is verdict
    assert f"{together_s / 0.01:.2f} times as long" in found.fact
    assert ("wait for the network" in found.remedy) is (verdict is Verdict.NOTE)


def test_a_straggler_is_named_with_its_host() -> None:
    facts = job(rank_on(0, "a", "10.0.0.1"), rank_on(1, "b", "10.0.0.2"), rank_on(2, "c", "10.0.0.3"))
    found = judge_stragglers(facts, {0: 0.010, 1: 0.031, 2: 0.011})
    assert verdicts(found) == [Verdict.NOTE]
    assert "Rank 1 on b takes 31.0 ms for what takes others 11.0 ms, 2.82 times as long." in found[0].fact


def test_one_of_two_can_be_the_straggler() -> None:
    assert "Rank 1 on b takes" in told(judge_stragglers(TWO_HOSTS, {0: 0.010, 1: 0.020}))
    assert verdicts(judge_stragglers(TWO_HOSTS, {0: 0.010, 1: 0.011})) == [Verdict.FINE]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome("silent"), "Rank 1 (pid 101 on b) fell silent"),
        (Outcome("failed", error="RuntimeError: boom"), "Rank 1 on b: RuntimeError: boom."),
        (Outcome("out of time", error="no end within 60 s"), "compare the MTU"),
        (Outcome("failed", error="RuntimeError: Timed out waiting"), "compare the MTU"),
    ],
)
def test_a_measurement_that_broke_off(outcome: Outcome, words: str) -> None:
    found = judge_failure("step", {0: Outcome("abandoned"), 1: outcome}, TWO_HOSTS)
    assert found.verdict is Verdict.BROKEN
    assert words in told([found])
