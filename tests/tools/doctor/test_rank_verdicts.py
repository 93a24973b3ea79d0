"""Verdicts on versions, environment, devices, cores, memory and load."""

from __future__ import annotations

from typing import Any

import pytest

from minddp.tools.doctor.findings import Severity
from minddp.tools.doctor.measurement import Measurement
from minddp.tools.doctor.rank_verdicts import Device, choose_device, judge_load, judge_sheets
from tests.tools.doctor.made_up import GIB, SHEET, job, of, severities, sheet, sheet_on

MIB = 2**20


def with_gpu(uuid: str, **changes: Any) -> Any:
    return sheet(gpu_name="H200", gpu_uuid=uuid, has_nvidia_driver=True, **changes)


OWN_GPUS = job(with_gpu("GPU-0"), with_gpu("GPU-1"))
ONE_GPU = job(with_gpu("GPU-0"), with_gpu("GPU-0"))
NO_GPU = job(sheet(), sheet())


def test_a_job_without_problems() -> None:
    found = judge_sheets(NO_GPU, "auto")
    assert [finding.check for finding in found] == ["versions", "environment", "devices", "cores", "memory"]
    assert severities(found) == [Severity.FINE] * 5
    assert [finding.fact for finding in found] == [
        "Python 3.11.7, torch 2.13.0, CUDA none, minddp 0.2.0 (12345678).",
        "OMP_NUM_THREADS=1.",
        "The CPU, with gloo: no rank has a GPU.",
        "a: 2 ranks with 2 threads on 2 cores.",
        "a: 16 GiB free and 8 GiB free in /dev/shm for 2 ranks.",
    ]


# ---------------------------------------------------------------------- versions and environment


@pytest.mark.parametrize(
    ("name", "severity"),
    [("torch", Severity.BROKEN), ("minddp", Severity.BROKEN), ("NCCL", Severity.BROKEN), ("Python", Severity.NOTE)],
)
def test_a_version_that_differs_is_named_with_its_ranks(name: str, severity: Severity) -> None:
    sheets = [sheet(versions={**SHEET.versions, name: "8"})] * 3 + [sheet(versions={**SHEET.versions, name: "9"})]
    (found,) = of("versions", judge_sheets(job(*sheets), "auto"))
    assert found.severity is severity
    assert found.fact == f"{name} is not the same everywhere: 8 on ranks 0-2; 9 on rank 3."


@pytest.mark.parametrize(
    ("name", "severity"),
    [("NCCL_ALGO", Severity.NOTE), ("GLOO_SOCKET_IFNAME", Severity.FINE), ("CUDA_VISIBLE_DEVICES", Severity.FINE)],
)
def test_a_variable_that_differs_unless_it_may(name: str, severity: Severity) -> None:
    sheets = job(sheet(environment={name: "x"}), sheet(environment={}))
    (found,) = of("environment", judge_sheets(sheets, "auto"))
    assert found.severity is severity
    assert (f"{name} is not the same everywhere: x on rank 0; (unset) on rank 1." == found.fact) is bool(
        found.remedy
    )


# ---------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("sheets", "wanted", "chosen", "severity", "words"),
    [
        (OWN_GPUS, "auto", "cuda", Severity.FINE, "A GPU for each of 2 ranks: H200."),
        (OWN_GPUS, "cpu", "cpu", Severity.FINE, "as --device cpu asks"),
        (ONE_GPU, "cpu", "cpu", Severity.FINE, "as --device cpu asks"),
        (ONE_GPU, "auto", "cpu", Severity.NOTE, "Ranks 0 and 1 on a: one H200 together, which NCCL refuses"),
        (ONE_GPU, "cuda", "cpu", Severity.BROKEN, "Ranks 0 and 1 on a: one H200 together, which NCCL refuses"),
        (NO_GPU, "cuda", "cpu", Severity.BROKEN, "no GPU in torch (torch for CUDA none, no NVIDIA driver,"),
        (
            job(sheet(has_nvidia_driver=True, environment={"CUDA_VISIBLE_DEVICES": "7"}), with_gpu("GPU-0")),
            *("auto", "cpu", Severity.NOTE),
            "Rank 0 on a: no GPU in torch (torch for CUDA none, an NVIDIA driver, CUDA_VISIBLE_DEVICES=7).",
        ),
    ],
)
def test_each_rank_needs_its_own_gpu(
    sheets: Any, wanted: Device, chosen: str, severity: Severity, words: str
) -> None:
    (found,) = of("devices", judge_sheets(sheets, wanted))
    assert choose_device(sheets, wanted) == chosen
    assert found.severity is severity
    assert words in found.fact


# ---------------------------------------------------------------------- hosts


@pytest.mark.parametrize(
    ("cores", "threads", "gpus", "words"),
    [
        (1.0, 1, False, "a: 2 ranks with 2 threads on 1 core: ranks take turns"),
        (1.5, 1, False, "on 1.5 cores: ranks take turns"),
        (4.0, 4, False, "8 threads on 4 cores: threads take turns"),
        (16.0, 1, False, "14 cores are idle"),
        (16.0, 1, True, ""),
        (16.0, 8, False, ""),
    ],
)
def test_threads_and_cores(cores: float, threads: int, gpus: bool, words: str) -> None:
    sheets = [with_gpu(f"GPU-{rank}" if gpus else "", cores=cores, threads=threads) for rank in range(2)]
    (found,) = of("cores", judge_sheets(job(*sheets), "auto"))
    assert found.severity is (Severity.NOTE if words else Severity.FINE)
    assert words in found.fact


def test_hosts_are_judged_one_by_one() -> None:
    found = judge_sheets(job(sheet(threads=2), sheet_on("b", "10.0.0.2", threads=8, memory_bytes=MIB)), "auto")
    assert [finding.fact for finding in of("cores", found)] == [
        "b: 1 rank with 8 threads on 2 cores: threads take turns, which is slower than fewer threads."
    ]
    assert "OMP_NUM_THREADS=2" in of("cores", found)[0].remedy
    assert [finding.fact[:2] for finding in of("memory", found)] == ["b:"]


@pytest.mark.parametrize(
    ("memory", "shared_memory", "severity", "remedy"),
    [
        (GIB, 8 * GIB, Severity.NOTE, "the kernel kills ranks"),
        (16 * GIB, 64 * MIB, Severity.NOTE, "--shm-size"),
        (16 * GIB, MIB, Severity.BROKEN, "--shm-size"),
        (16 * GIB, GIB, Severity.FINE, ""),
        (16 * GIB, None, Severity.FINE, ""),
    ],
)
def test_memory(memory: int, shared_memory: int | None, severity: Severity, remedy: str) -> None:
    sheets = job(*[sheet(memory_bytes=memory, shared_memory_bytes=shared_memory)] * 2)
    (found,) = of("memory", judge_sheets(sheets, "auto"))
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
