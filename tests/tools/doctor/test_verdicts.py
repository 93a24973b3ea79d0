"""Verdicts on invented facts and measurements of jobs."""

from __future__ import annotations

import dataclasses

import pytest

from minddp.tools.doctor.measurement import FactSheet
from minddp.tools.doctor.verdicts import (
    CheckResult,
    Severity,
    judge_arrivals,
    judge_link,
    judge_network,
    judge_obstacle,
    judge_settings,
)
from minddp.tools.forecast.link import Link
from minddp.tools.job.place import Place
from minddp.tools.job.store_connection import StoreUnreachable

PLACE = Place(1, 3, "node1", 29500)
SETTINGS = {"torch": "2.13.0", "minddp": "0.2.0", "device": "cpu", "OMP_NUM_THREADS": "1"}
A = FactSheet("a", SETTINGS, "10.0.0.97")
B = FactSheet("b", SETTINGS, "10.0.0.98")


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
    complete = judge_arrivals(PLACE, job(A, A, B), 30.0)
    assert complete.severity is Severity.FINE
    assert complete.fact == "3 ranks met at node1:29500: a on ranks 0 and 1; b on rank 2."
    incomplete = judge_arrivals(PLACE, {2: B}, 30.0)
    assert incomplete.severity is Severity.BROKEN
    assert incomplete.fact == "Ranks 0 and 1 have not arrived within 30 s. Present: b on rank 2."
    assert "WORLD_SIZE=3 MASTER_ADDR=node1 MASTER_PORT=29500" in incomplete.remedy


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


# ---------------------------------------------------------------------- network and link


@pytest.mark.parametrize(
    ("errors", "severity", "fact"),
    [
        ({}, Severity.FINE, "2 ranks can connect, and their sum is right"),
        (
            {0: "refused", 1: "no answer"},
            Severity.BROKEN,
            "The process group failed: refused (a) on rank 0; no answer (b) on rank 1",
        ),
    ],
)
def test_a_process_group_that_fails_is_told_with_the_addresses(
    errors: dict[int, str], severity: Severity, fact: str
) -> None:
    found = judge_network(job(A, B), errors)
    assert found.severity is severity
    assert found.fact == f"{fact}; gloo listens at 10.0.0.97 on rank 0; 10.0.0.98 on rank 1."
    assert bool(found.remedy) is (severity is not Severity.FINE)


@pytest.mark.parametrize(
    ("link", "severity"),
    [(Link(2e-4, 2e9), Severity.FINE), (Link(2e-4, 50e6), Severity.NOTE), (Link(20e-3, 2e9), Severity.NOTE)],
)
def test_a_link(link: Link, severity: Severity) -> None:
    found = judge_link(link)
    assert found.severity is severity
    assert (
        found.fact == f"An all-reduce takes {1e3 * link.latency_s:.2f} ms, then {link.bytes_per_s / 1e9:.2f} GB/s."
    )
    assert ("fastest network" in found.remedy) is (severity is Severity.NOTE)
