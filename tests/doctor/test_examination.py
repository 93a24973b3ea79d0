"""Examinations that end early, by ranks that are threads: nobody gets as far as a process group."""

from __future__ import annotations

import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from minddp.doctor.examination import examine
from minddp.doctor.findings import Finding, Verdict
from minddp.doctor.place import Place
from minddp.doctor.progress import Progress
from minddp.doctor.report import Report
from tests.doctor.test_meeting import free_port

LIMIT_S = 1.5


def examined(places: list[Place], environment: Mapping[str, str], limit_s: float = LIMIT_S) -> dict[int, Report]:
    """The reports that are delivered, by the index of the place."""
    delivered: dict[int, Report] = {}

    def be_rank(index: int) -> None:
        progress = Progress(Console(file=io.StringIO()), False, "rank")
        examine(
            places[index],
            "cpu",
            limit_s,
            environment,
            progress,
            lambda report: delivered.update({index: report}),
        )

    with ThreadPoolExecutor(len(places)) as threads:
        list(threads.map(be_rank, range(len(places))))
    return delivered


def two_places() -> list[Place]:
    port = free_port()
    return [Place(rank, 2, "127.0.0.1", port, hosts_store=rank == 0) for rank in range(2)]


def broken(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.verdict is Verdict.BROKEN]


def test_a_rank_that_never_comes() -> None:
    delivered = examined(two_places()[:1], {})
    (finding,) = broken(delivered[0])
    assert finding.fact.startswith("Rank 1 has not come within 1.5 s. 1 of 2 ranks met at 127.0.0.1:")
    assert delivered[0].not_checked[-1] == "step"


def test_rank_0_that_never_comes() -> None:
    (finding,) = broken(examined(two_places()[1:], {})[0])
    assert "Nobody listens at 127.0.0.1:" in finding.fact


def test_rank_0_is_missing_where_a_launcher_hosts_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torchrun. Rank 0's own host is there, but rank 0 is not: played by a rank of another job."""
    monkeypatch.setattr("minddp.doctor.examination._MARGIN_S", 0.5)
    places = two_places()
    other = Place(0, 1, places[0].address, places[0].port, hosts_store=True, round=7)
    from minddp.doctor.meeting import open_store

    store = open_store(other, 20.0).store
    (finding,) = broken(examined(places[1:], {})[0])
    assert "Rank 0 has not come within 1.5 s." in finding.fact
    assert store is not None


def test_a_wrong_interface() -> None:
    """Only rank 0 reports, and nothing is tried that would hang."""
    delivered = examined(two_places(), {"GLOO_SOCKET_IFNAME": "nosuch0"}, limit_s=20.0)
    assert list(delivered) == [0]
    (finding,) = broken(delivered[0])
    assert "GLOO_SOCKET_IFNAME=nosuch0" in finding.fact
    assert "(ranks 0, 1), but nosuch0 does not exist there." in finding.fact
    assert delivered[0].not_checked == ("network", "clocks", "load", "stragglers", "collectives", "step")
    assert delivered[0].exit_status == 1


def test_two_processes_that_are_one_rank() -> None:
    places = two_places()
    delivered = examined([places[0], places[0].__class__(**{**vars(places[0]), "hosts_store": False})], {})
    assert any("Several processes claim to be rank 0." in broken(report)[0].fact for report in delivered.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_that_is_alone_says_so_itself(rank: int) -> None:
    place = Place(rank, 2, "no-such-host.invalid", free_port(), hosts_store=rank == 0)
    report = examined([place], {})[0]
    assert report.title.startswith(f"minddp doctor: rank {rank} of 2, on ")
    assert "no-such-host.invalid" in broken(report)[0].fact
    assert report.not_checked == ("all else",)
