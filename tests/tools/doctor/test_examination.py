"""Examinations that end before a process group is made, and their parts, by ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from minddp.platform.store import Messages
from minddp.tools.doctor.examination import CHECKS, SILENT, Examination, run_on_all
from minddp.tools.doctor.report import CheckResult, Report, Severity
from minddp.tools.job.place import Place
from minddp.tools.job.store_connection import open_store
from tests.tools.job.test_store_connection import free_port

LIMIT_S = 1.5


def examined(places: list[Place], limit_s: float = LIMIT_S) -> dict[int, Report]:
    """The reports that are delivered, by the index of the place."""
    delivered: dict[int, Report] = {}

    def be_rank(index: int) -> None:
        Examination(places[index], "cpu", limit_s).run(lambda report: delivered.update({index: report}))

    with ThreadPoolExecutor(len(places)) as threads:
        list(threads.map(be_rank, range(len(places))))
    return delivered


def two_places() -> list[Place]:
    port = free_port()
    return [Place(rank, 2, "127.0.0.1", port, hosts_store=rank == 0) for rank in range(2)]


def broken(report: Report) -> CheckResult:
    (finding,) = (finding for finding in report.findings if finding.severity is Severity.BROKEN)
    return finding


def test_a_rank_that_does_not_arrive() -> None:
    delivered = examined(two_places()[:1])
    assert broken(delivered[0]).fact.startswith("Rank 1 has not arrived at 127.0.0.1:")
    assert tuple(delivered[0].not_checked) == CHECKS[1:]


def test_rank_0_that_does_not_arrive() -> None:
    report = examined(two_places()[1:])[0]
    assert report.title.startswith("minddp doctor: rank 1 of 2, alone, on ")
    assert "Nothing listens at 127.0.0.1:" in broken(report).fact


def test_rank_0_that_does_not_arrive_where_a_launcher_hosts_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun: the store answers. Its host here is a rank of a job from before a restart."""
    monkeypatch.setattr("minddp.tools.doctor.examination.MARGIN_S", 0.5)
    places = two_places()
    store = open_store(Place(0, 1, places[0].address, places[0].port, hosts_store=True, restarts=7), 20.0)
    assert "Rank 0 has not arrived" in broken(examined(places[1:])[0]).fact
    assert store is not None


def test_ranks_with_another_world_size_are_not_in_the_job() -> None:
    first, second = two_places()
    delivered = examined([first, Place(1, 3, second.address, second.port)])
    assert "Rank 1 has not arrived" in broken(delivered[0]).fact
    assert "WORLD_SIZE=2" in broken(delivered[0]).remedy
    assert 1 in delivered  # says the same about rank 0


def test_a_store_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset\nframe #0: somewhere in C++")

    monkeypatch.setattr("minddp.tools.doctor.examination.collect", collect)
    delivered = examined([Place(0, 1, "127.0.0.1", free_port(), hosts_store=True)])
    assert "is lost (Connection reset): the process that hosts it" in broken(delivered[0]).fact


def test_a_wrong_interface_ends_the_examination_of_all_and_rank_0_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    delivered = examined(two_places(), limit_s=20.0)
    assert list(delivered) == [0]
    assert "GLOO_SOCKET_IFNAME=nosuch0" in broken(delivered[0]).fact
    assert "(ranks 0 and 1), but there is no nosuch0 there" in broken(delivered[0]).fact
    assert delivered[0].not_checked == ["network", "load", "collectives"]
    assert delivered[0].exit_status == 1


# ---------------------------------------------------------------------- parts that run on every rank


def outcomes(part: Callable[[int], Any], limit_s: float = 20.0, present: int = 3) -> list[Any]:
    """What `run_on_all` returns to the present ranks, of three."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        return run_on_all(Messages(store, "test", rank, 3), "work", lambda: part(rank), limit_s)

    with ThreadPoolExecutor(present) as threads:
        return list(threads.map(run, range(present)))


def test_every_rank_gets_the_values_and_the_errors_of_all() -> None:
    error = "ZeroDivisionError: integer division or modulo by zero"
    assert outcomes(lambda rank: rank * 10) == [({0: 0, 1: 10, 2: 20}, {})] * 3
    assert outcomes(lambda rank: 6 // rank) == [({1: 6, 2: 3}, {0: error})] * 3


def test_a_part_has_a_time_limit() -> None:
    never = threading.Event()
    error = {1: "timed out after 0.5 s"}
    assert outcomes(lambda rank: never.wait() if rank == 1 else rank, 0.5) == [({0: 0, 2: 2}, error)] * 3
    never.set()


def test_a_silent_rank_is_named_instead_of_those_that_fail_because_of_it() -> None:
    assert outcomes(lambda rank: 1 // rank, 0.5, present=2) == [({}, {2: SILENT})] * 2
