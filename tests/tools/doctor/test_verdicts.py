"""Verdicts on invented facts and measurements of jobs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from minddp.tools.doctor.measurement import FactSheet, Measurement
from minddp.tools.doctor.verdicts import (
    CheckResult,
    Severity,
    judge_arrivals,
    judge_network,
    judge_obstacle,
    judge_settings,
    judge_speed,
)
from minddp.tools.forecast.link import Link
from minddp.tools.job.place import Place
from minddp.tools.job.store_connection import StoreUnreachable

PLACE = Place(1, 3, "node1", 29500)
SETTINGS = {"torch": "2.13.0", "minddp": "0.2.0", "device": "cpu", "OMP_NUM_THREADS": "1"}
A = FactSheet("a", 100, SETTINGS, ("10.0.0.97", 4000))
B = FactSheet("b", 200, SETTINGS, ("10.0.0.98", 4000))


def with_setting(sheet: FactSheet, name: str, value: str) -> FactSheet:
    return dataclasses.replace(sheet, settings={**sheet.settings, name: value})


def job(*sheets: FactSheet) -> dict[int, FactSheet]:
    return dict(enumerate(sheets))


def test_a_result_as_text() -> None:
    assert str(CheckResult("link", Severity.FINE, "Fast.")) == "fine    link: Fast."
    slow = CheckResult("link", Severity.NOTE, "Slow.", "Buy a faster one.")
    assert str(slow) == "note    link: Slow.\n        -> Buy a faster one."


# ---------------------------------------------------------------------- rendezvous


def test_an_obstacle_is_named_with_rank_and_addresses() -> None:
    found = judge_obstacle(PLACE, StoreUnreachable("Connection refused", ("10.0.0.1",)))
    assert found.severity is Severity.BROKEN
    assert found.fact == "Rank 1 cannot use the store at node1:29500 (10.0.0.1): Connection refused."


def test_ranks_that_have_not_arrived_are_named() -> None:
    complete = judge_arrivals(PLACE, job(A, A, B), {}, 30.0)
    assert complete.severity is Severity.FINE
    assert complete.fact == "3 ranks met at node1:29500: a on ranks 0 and 1; b on rank 2."
    incomplete = judge_arrivals(PLACE, {2: B}, {}, 30.0)
    assert incomplete.severity is Severity.BROKEN
    assert incomplete.fact == "Ranks 0 and 1 have not arrived within 30 s. Present: b on rank 2."
    assert "WORLD_SIZE=3 MASTER_ADDR=node1 MASTER_PORT=29500" in incomplete.remedy


@pytest.mark.parametrize(
    ("present", "both"), [(job(A, A), "pid 100 on a and pid 200 on b"), ({0: A}, "pid 200 on b")]
)
def test_two_processes_as_one_rank_are_named(present: dict[int, FactSheet], both: str) -> None:
    found = judge_arrivals(PLACE, present, {1: B}, 30.0)
    assert found.severity is Severity.BROKEN
    assert found.fact.startswith(f"Two processes have registered as rank 1: {both}. Rank")
    assert "each with its own RANK" in found.remedy


# ---------------------------------------------------------------------- settings


def test_equal_settings_are_listed() -> None:
    (found,) = judge_settings(job(A, B))
    assert found.severity is Severity.FINE
    assert found.fact == "torch 2.13.0, minddp 0.2.0, device cpu, OMP_NUM_THREADS 1."


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("torch", Severity.BROKEN),
        ("minddp", Severity.BROKEN),
        ("device", Severity.BROKEN),
        ("NCCL_ALGO", Severity.NOTE),
        ("GLOO_SOCKET_IFNAME", Severity.FINE),
    ],
)
def test_a_setting_that_differs_is_named_with_its_ranks(name: str, severity: Severity) -> None:
    (found,) = judge_settings(job(*[with_setting(A, name, "x")] * 3, with_setting(B, name, "y")))
    assert found.severity is severity
    if severity is not Severity.FINE:
        assert found.fact == f"{name} is not the same everywhere: x on ranks 0-2; y on rank 3."


def test_a_variable_may_be_unset() -> None:
    (found,) = judge_settings(job(with_setting(A, "NCCL_ALGO", "Ring"), B))
    assert found.fact == "NCCL_ALGO is not the same everywhere: Ring on rank 0; (unset) on rank 1."


# ---------------------------------------------------------------------- network


@pytest.mark.parametrize(
    ("blocked", "errors", "severity", "fact"),
    [
        (
            {},
            {},
            Severity.FINE,
            "2 ranks can connect to each other, and their sum is right: gloo listens at 10.0.0.97 on rank 0; "
            "10.0.0.98 on rank 1.",
        ),
        (
            {1: "refused"},
            {},
            Severity.NOTE,  # gloo needs one direction only
            "Rank 1 on b cannot connect to rank 0 on a at 10.0.0.97: refused.",
        ),
        (
            {0: "timed out"},
            {0: "no answer", 1: "no answer"},
            Severity.BROKEN,
            "Rank 0 on a cannot connect to rank 1 on b at 10.0.0.98: timed out. The process group failed: no "
            "answer (a) on rank 0; no answer (b) on rank 1.",
        ),
    ],
)
def test_the_pair_that_cannot_connect_is_named(
    blocked: dict[int, str], errors: dict[int, str], severity: Severity, fact: str
) -> None:
    found = judge_network(job(A, B), blocked, errors)
    assert (found.severity, found.fact) == (severity, fact)
    assert bool(found.remedy) is (severity is not Severity.FINE)


# ---------------------------------------------------------------------- speed


def speed(**changes: Any) -> list[CheckResult]:
    """The reports of three ranks. The last one has another computing time."""
    given = {"latency_s": 2e-4, "bytes_per_s": 2e9, "computing_s": 0.1, **changes}
    link = Link(given["latency_s"], given["bytes_per_s"])
    measured = {rank: Measurement(0.1 if rank < 2 else given["computing_s"], link) for rank in range(3)}
    return judge_speed(job(A, A, B), measured)


def test_a_fast_link_and_equal_ranks() -> None:
    link, computing = speed()
    assert link == CheckResult("link", Severity.FINE, "An all-reduce takes 0.20 ms, then 2.00 GB/s.")
    assert computing.severity is Severity.FINE


@pytest.mark.parametrize("slow", [{"bytes_per_s": 50e6}, {"latency_s": 20e-3}])
def test_a_slow_link(slow: dict[str, float]) -> None:
    link, _ = speed(**slow)
    assert link.severity is Severity.NOTE
    assert "fastest network" in link.remedy


def test_a_slow_rank() -> None:
    _, computing = speed(computing_s=0.23)
    assert computing.severity is Severity.NOTE
    assert computing.fact == "The slowest rank needs 2.3 times as long as the median for the same work."
    assert "wait for rank 2 on b." in computing.remedy
