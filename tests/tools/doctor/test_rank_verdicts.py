"""Verdicts on versions, environment, shared memory and load."""

from __future__ import annotations

import pytest

from minddp.tools.doctor.measurement import Measurement
from minddp.tools.doctor.rank_verdicts import judge_load, judge_sheets
from minddp.tools.doctor.report import Severity
from tests.tools.doctor.made_up import GIB, SHEET, job, of, severities, sheet, sheet_on

MIB = 2**20


def test_a_job_without_problems() -> None:
    found = judge_sheets(job(sheet(), sheet()))
    assert [finding.check for finding in found] == ["versions", "environment", "shared memory"]
    assert severities(found) == [Severity.FINE] * 3
    assert [finding.fact for finding in found] == [
        "Python 3.11.7, torch 2.13.0, CUDA none, minddp 0.2.0 (12345678).",
        "OMP_NUM_THREADS=1.",
        "a: 8 GiB free in /dev/shm for 2 ranks.",
    ]


# ---------------------------------------------------------------------- versions and environment


@pytest.mark.parametrize(
    ("name", "severity"),
    [("torch", Severity.BROKEN), ("minddp", Severity.BROKEN), ("NCCL", Severity.BROKEN), ("Python", Severity.NOTE)],
)
def test_a_version_that_differs_is_named_with_its_ranks(name: str, severity: Severity) -> None:
    sheets = [sheet(versions={**SHEET.versions, name: "8"})] * 3 + [sheet(versions={**SHEET.versions, name: "9"})]
    (found,) = of("versions", judge_sheets(job(*sheets)))
    assert found.severity is severity
    assert found.fact == f"{name} is not the same everywhere: 8 on ranks 0-2; 9 on rank 3."


@pytest.mark.parametrize(
    ("name", "severity"),
    [("NCCL_ALGO", Severity.NOTE), ("GLOO_SOCKET_IFNAME", Severity.FINE), ("CUDA_VISIBLE_DEVICES", Severity.FINE)],
)
def test_a_variable_that_differs_unless_it_may(name: str, severity: Severity) -> None:
    sheets = job(sheet(environment={name: "x"}), sheet(environment={}))
    (found,) = of("environment", judge_sheets(sheets))
    assert found.severity is severity
    assert (f"{name} is not the same everywhere: x on rank 0; (unset) on rank 1." == found.fact) is bool(
        found.remedy
    )


# ---------------------------------------------------------------------- hosts


def test_hosts_are_judged_one_by_one() -> None:
    found = judge_sheets(job(sheet(), sheet(), sheet_on("b", "10.0.0.2", shared_memory_bytes=64 * MIB)))
    assert [(finding.fact, finding.severity) for finding in of("shared memory", found)] == [
        ("a: 8 GiB free in /dev/shm for 2 ranks.", Severity.FINE),
        ("b: 64 MiB free in /dev/shm for 1 rank.", Severity.NOTE),
    ]


@pytest.mark.parametrize(
    ("shared_memory", "severity", "remedy"),
    [
        (64 * MIB, Severity.NOTE, "--shm-size"),
        (MIB, Severity.BROKEN, "--shm-size"),
        (GIB, Severity.FINE, ""),
        (None, Severity.FINE, ""),
    ],
)
def test_shared_memory(shared_memory: int | None, severity: Severity, remedy: str) -> None:
    (found,) = of("shared memory", judge_sheets(job(*[sheet(shared_memory_bytes=shared_memory)] * 2)))
    assert found.severity is severity
    assert remedy in found.remedy


# ---------------------------------------------------------------------- load


def test_a_host_whose_ranks_had_no_core() -> None:
    sheets = job(sheet(), sheet_on("b", "10.0.0.2"), sheet_on("b", "10.0.0.2"))
    (quiet,) = judge_load(sheets, {rank: Measurement(0.03, {}) for rank in range(3)})
    assert quiet.severity is Severity.FINE
    assert quiet.fact == "Ranks had no core for up to 3% of the time in which they computed."
    (busy,) = judge_load(sheets, {rank: Measurement(share, {}) for rank, share in enumerate((0.1, 0.4, 0.3))})
    assert busy.severity is Severity.NOTE
    assert busy.fact == "Ranks 1 and 2 on b had no core for up to 40% of the time in which they computed."
