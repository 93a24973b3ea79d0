"""Room on the hosts."""

from __future__ import annotations

from typing import Any

import pytest

from minddp.doctor.findings import Finding, Verdict
from minddp.doctor.verdicts.machine import judge_machines
from tests.doctor.made_up import GIB, job, rank, rank_on, verdicts

MIB = 2**20


def judged(check: str, on_gpu: bool = False, **machine: Any) -> list[Finding]:
    """What is found of two ranks on a machine with these properties."""
    facts = job(rank(0, machine=machine), rank(1, machine=machine))
    return [finding for finding in judge_machines(facts, on_gpu) if finding.check == check]


def test_room_enough_is_one_line_for_each_thing() -> None:
    found = judge_machines(job(rank(0), rank(1)), on_gpu=False)
    assert [finding.check for finding in found] == ["cores", "memory", "shared memory", "open files"]
    assert verdicts(found) == [Verdict.FINE] * 4
    assert found[0].fact == "a: 2 ranks with 1 thread each on 2 cores."


@pytest.mark.parametrize(
    ("machine", "on_gpu", "words"),
    [
        ({"cores": 1.0}, False, "they take turns"),
        ({"cores": 4.0, "threads": 4}, False, "8 threads take turns"),
        ({"cores": 1.5, "threads": 1}, False, "on 1.5 cores: they take turns"),
        ({"cores": 16.0, "threads": 1}, False, "14 have nothing to do"),
        ({"cores": 16.0, "threads": 1}, True, ""),
        ({"cores": 16.0, "threads": 8}, False, ""),
    ],
)
def test_threads_against_cores(machine: Any, on_gpu: bool, words: str) -> None:
    (found,) = judged("cores", on_gpu, **machine)
    assert found.verdict is (Verdict.NOTE if words else Verdict.FINE)
    assert words in found.fact


def test_the_number_of_threads_to_set() -> None:
    assert "OMP_NUM_THREADS=8" in judged("cores", cores=16.0, threads=16)[0].remedy


def test_hosts_are_judged_one_by_one() -> None:
    facts = job(rank(0, machine={"threads": 2}), rank_on(1, "b", "10.0.0.2", machine={"threads": 4}))
    (found,) = [finding for finding in judge_machines(facts, on_gpu=False) if finding.check == "cores"]
    assert found.fact.startswith("b: 1 rank with 4 threads each on 2 cores")


def test_little_memory() -> None:
    (found,) = judged("memory", memory_bytes=GIB)
    assert found.verdict is Verdict.NOTE
    assert "1.0 GiB of memory are free for 2 ranks" in found.fact


@pytest.mark.parametrize(
    ("free_bytes", "verdict"),
    [(None, Verdict.NOTE), (64 * MIB, Verdict.NOTE), (MIB, Verdict.BROKEN), (GIB, Verdict.FINE)],
)
def test_shared_memory(free_bytes: int | None, verdict: Verdict) -> None:
    (found,) = judged("shared memory", shared_memory_bytes=free_bytes)
    assert found.verdict is verdict
    assert ("--shm-size" in found.remedy) == (verdict is not Verdict.FINE)


@pytest.mark.parametrize(("limit", "verdict"), [(65536, Verdict.FINE), (1024, Verdict.NOTE), (64, Verdict.BROKEN)])
def test_open_files(limit: int, verdict: Verdict) -> None:
    (found,) = judged("open files", open_files=limit)
    assert found.verdict is verdict
    assert verdict is Verdict.FINE or f"Ranks 0, 1 may have {limit} files" in found.fact.replace("ranks", "Ranks")
