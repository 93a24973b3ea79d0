"""Versions and environment variables that differ."""

from __future__ import annotations

from typing import Any

import pytest

from minddp.doctor.findings import Finding, Verdict
from minddp.doctor.verdicts.software import judge_software
from tests.doctor.made_up import NETWORK, SOFTWARE, job, rank, told, verdicts


def with_version(number: int, name: str, version: str) -> Any:
    return rank(number, software={"versions": {**SOFTWARE.versions, name: version}})


def with_variables(number: int, host: str = "a", **variables: str) -> Any:
    return rank(number, software={"environment": variables}, network={"identity": f"network of {host}"})


def of(findings: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check]


def test_equal_ranks_are_fine() -> None:
    found = judge_software(job(rank(0), rank(1)))
    assert verdicts(found) == [Verdict.FINE, Verdict.FINE]
    assert found[0].fact == "Python 3.11.7, torch 2.13.0, minddp 0.1.0, NumPy 2.4.6 on every rank."
    assert found[1].fact == "OMP_NUM_THREADS=1 on every rank."


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("torch", Verdict.BROKEN),
        ("minddp's source", Verdict.BROKEN),
        ("NumPy", Verdict.NOTE),
        ("Python", Verdict.NOTE),
    ],
)
def test_a_version_that_differs_is_named_with_its_ranks(name: str, verdict: Verdict) -> None:
    facts = job(*(with_version(number, name, "8") for number in range(3)), with_version(3, name, "9"))
    (found,) = of(judge_software(facts), "versions")
    assert found.verdict is verdict
    assert f"{name} is not the same everywhere: 8 on ranks 0-2, 9 on rank 3." in found.fact


def test_a_package_that_one_rank_lacks() -> None:
    (found,) = of(judge_software(job(rank(0), with_version(1, "NCCL", "2.29.3"))), "versions")
    assert found.verdict is Verdict.BROKEN
    assert "unknown on rank 0" in found.fact


def test_a_variable_that_differs() -> None:
    facts = job(with_variables(0, "a", NCCL_ALGO="Ring"), with_variables(1, "b"))
    (found,) = of(judge_software(facts), "environment")
    assert found.verdict is Verdict.NOTE
    assert "NCCL_ALGO is not the same everywhere: Ring on rank 0, (unset) on rank 1." in found.fact


def test_interfaces_may_differ_between_hosts_but_not_within_one() -> None:
    between = job(
        with_variables(0, "a", GLOO_SOCKET_IFNAME="eth0"), with_variables(1, "b", GLOO_SOCKET_IFNAME="eth1")
    )
    within = job(
        with_variables(0, "a", GLOO_SOCKET_IFNAME="eth0"), with_variables(1, "a", GLOO_SOCKET_IFNAME="eth1")
    )
    assert verdicts(of(judge_software(between), "environment")) == [Verdict.FINE]
    assert verdicts(of(judge_software(within), "environment")) == [Verdict.NOTE]
    assert NETWORK.identity == "network of a"


def test_each_rank_may_have_visible_devices_of_its_own() -> None:
    facts = job(with_variables(0, CUDA_VISIBLE_DEVICES="0"), with_variables(1, CUDA_VISIBLE_DEVICES="1"))
    assert verdicts(of(judge_software(facts), "environment")) == [Verdict.FINE]


def test_settings_for_debugging_are_pointed_out() -> None:
    facts = job(*(with_variables(number, TORCH_DISTRIBUTED_DEBUG="detail") for number in range(2)))
    (found,) = of(judge_software(facts), "environment")
    assert found.verdict is Verdict.NOTE
    assert "TORCH_DISTRIBUTED_DEBUG=detail: every collective is checked" in found.fact


def test_one_rank_alone_is_compared_with_nobody() -> None:
    assert "every rank" not in told(judge_software(job(rank(0))))
