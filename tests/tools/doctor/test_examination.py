"""Examinations by ranks that are threads: these end before a process group is made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch.distributed as dist

from minddp.tools.doctor.doctor_command import BrokenCheck, Examination
from minddp.tools.doctor.verdicts import CheckResult, Severity
from minddp.tools.job.place import Place
from minddp.tools.job.store_connection import open_store
from tests.tools.job.test_store_connection import free_port

LIMIT_S = 1.5


def examined(places: list[Place], limit_s: float = LIMIT_S) -> dict[int, list[CheckResult]]:
    """The results that are shown, by the index of the place."""
    shown: dict[int, list[CheckResult]] = {}

    def be_rank(index: int) -> None:
        def show(result: CheckResult) -> None:
            shown.setdefault(index, []).append(result)

        with suppress(BrokenCheck):
            Examination(places[index], limit_s, show).run()

    with ThreadPoolExecutor(len(places)) as threads:
        list(threads.map(be_rank, range(len(places))))
    return shown


def two_places() -> list[Place]:
    port = free_port()
    return [Place(rank, 2, "127.0.0.1", port, hosts_store=rank == 0) for rank in range(2)]


def broken(results: list[CheckResult]) -> CheckResult:
    """The last result, and the only one that is broken."""
    (result,) = (result for result in results if result.severity is Severity.BROKEN)
    assert results[-1] is result
    return result


def test_a_rank_that_does_not_arrive() -> None:
    assert broken(examined(two_places()[:1])[0]).fact.startswith("Rank 1 has not arrived within 1.5 s.")


def test_rank_0_that_does_not_arrive() -> None:
    fact = broken(examined(two_places()[1:])[0]).fact
    assert fact.startswith("Rank 1 cannot use the store at 127.0.0.1:")
    assert "refused" in fact


def test_rank_0_that_does_not_arrive_where_a_launcher_hosts_the_store() -> None:
    """As under torchrun: the store answers. Its host here is a rank of a job from before a restart."""
    places = two_places()
    store = open_store(Place(0, 1, places[0].address, places[0].port, hosts_store=True, restarts=7), 20.0)
    assert "Rank 0 has not arrived" in broken(examined(places[1:])[0]).fact
    assert store is not None


def test_ranks_with_another_world_size_are_not_in_the_job() -> None:
    first, second = two_places()
    shown = examined([first, Place(1, 3, second.address, second.port)])
    assert "Rank 1 has not arrived" in broken(shown[0]).fact
    assert "WORLD_SIZE=2" in broken(shown[0]).remedy
    assert 1 in shown  # alone in a job of three


def test_a_store_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset\nframe #0: somewhere in C++")

    monkeypatch.setattr("minddp.tools.doctor.doctor_command.collect", collect)
    shown = examined([Place(0, 1, "127.0.0.1", free_port(), hosts_store=True)])
    assert "is lost: Connection reset." in broken(shown[0]).fact
