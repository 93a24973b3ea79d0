"""Examinations that end before a process group is made, by ranks that are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from minddp.tools.doctor.examination import CHECKS, Examination
from minddp.tools.doctor.findings import Finding, Report, Severity
from minddp.tools.doctor.store_connection import Place, open_store
from tests.tools.doctor.test_store_connection import free_port

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


def broken(report: Report) -> Finding:
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
