"""Verdicts on the rendezvous, interfaces, connections and collectives."""

from __future__ import annotations

from typing import get_args

import pytest

from minddp.tools.doctor.measurement import Measurement
from minddp.tools.doctor.network_verdicts import (
    judge_arrivals,
    judge_collectives,
    judge_connections,
    judge_interfaces,
    judge_obstacle,
)
from minddp.tools.doctor.report import Severity
from minddp.tools.job.place import Place
from minddp.tools.job.store_connection import Obstacle, StoreUnreachable
from tests.tools.doctor.made_up import job, severities, sheet, sheet_on

PLACE = Place(1, 3, "node1", 29500)
ONE_HOST = job(sheet(), sheet())
TWO_HOSTS = job(sheet_on("a", "10.0.0.97"), sheet_on("b", "10.0.0.98"))
LOOPBACKS = job(sheet_on("a", "127.0.1.1"), sheet_on("b", "127.0.1.1"))
OPEN: dict[int, dict[int, str]] = {0: {}, 1: {}}
BLOCKED = {0: {1: "refused"}, 1: {0: "no answer"}}


@pytest.mark.parametrize("obstacle", get_args(Obstacle))
def test_every_obstacle_has_a_fact_and_a_remedy(obstacle: Obstacle) -> None:
    error = StoreUnreachable(obstacle, "what the system said", ("10.0.0.1",))
    found = judge_obstacle(PLACE, error, {"eth0": "10.0.0.2"}, 30.0)
    assert found.severity is Severity.BROKEN
    assert "29500" in found.fact or "node1" in found.fact
    assert found.fact.endswith("This is rank 1; its host has 10.0.0.2 (eth0).")
    assert "{" not in found.fact + found.remedy
    assert found.remedy
    if obstacle == "no answer":
        assert found.fact.startswith("node1:29500 (10.0.0.1) did not answer for 30 s")


def test_ranks_that_have_not_arrived_are_named() -> None:
    sheets = job(sheet(), sheet(), sheet_on("b", "10.0.0.98"))
    complete = judge_arrivals(PLACE, sheets, [], 30.0)
    assert complete.severity is Severity.FINE
    assert complete.fact == "3 ranks met at node1:29500: ranks 0 and 1 on a; rank 2 on b."
    del sheets[0], sheets[1]
    incomplete = judge_arrivals(PLACE, sheets, [0, 1], 30.0)
    assert incomplete.severity is Severity.BROKEN
    assert incomplete.fact == "Ranks 0 and 1 have not arrived at node1:29500 within 30 s. Present: rank 2 on b."
    assert "WORLD_SIZE=3 MASTER_ADDR=node1 MASTER_PORT=29500" in incomplete.remedy


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [("eth0", ""), ("", ""), ("eth7", "no eth7 there"), ("eth0,eth7,eth8", "no eth7 and eth8")],
)
def test_the_interfaces_that_a_variable_names_exist(wanted: str, missing: str) -> None:
    sheets = job(*[sheet(environment={"GLOO_SOCKET_IFNAME": wanted})] * 2)
    (found,) = judge_interfaces(sheets)
    assert found.severity is (Severity.BROKEN if missing else Severity.FINE)
    assert (missing or "gloo listens at 10.0.0.1 (a) on ranks 0 and 1.") in found.fact
    if missing:
        assert f"GLOO_SOCKET_IFNAME={wanted} on a (ranks 0 and 1)" in found.fact
        assert found.fact.endswith("Interfaces with an address: lo, eth0.")


# ---------------------------------------------------------------------- connections


def test_ranks_that_connect() -> None:
    found = judge_connections(TWO_HOSTS, OPEN, {})
    assert found.severity is Severity.FINE
    assert found.fact == "Connections work between 2 ranks."


def test_ranks_that_do_not_connect() -> None:
    found = judge_connections(TWO_HOSTS, BLOCKED, {1: "RuntimeError: Connect timeout"})
    assert found.severity is Severity.BROKEN
    assert found.fact == (
        "The process group failed on rank 1 (pid 100 on b): RuntimeError: Connect timeout on rank 1. No connection "
        "from rank 0 on a to rank 1 at 10.0.0.98 on b (refused); rank 1 on b to rank 0 at 10.0.0.97 on a (no "
        "answer)."
    )
    assert "Open all TCP ports between the hosts" in found.remedy


def test_a_process_group_that_fails_although_ranks_connect() -> None:
    found = judge_connections(TWO_HOSTS, OPEN, {0: "no answer", 1: "no answer"})
    assert found.severity is Severity.BROKEN
    assert found.fact == (
        "The process group failed on rank 0 (pid 100 on a) and rank 1 (pid 100 on b): no answer on ranks 0 and 1."
    )
    assert "compare the MTU" in found.remedy


def test_a_blocked_direction_that_gloo_does_not_need_is_a_note() -> None:
    found = judge_connections(TWO_HOSTS, {0: {}, 1: {0: "refused"}}, {})
    assert found.severity is Severity.NOTE
    assert found.fact == "No connection from rank 1 on b to rank 0 at 10.0.0.97 on a (refused)."


def test_many_blocked_pairs_are_not_all_listed() -> None:
    sheets = job(*(sheet_on(host, "10.0.0.1") for host in "abcde"))
    blocked = {rank: {peer: "refused" for peer in range(5) if peer != rank} for rank in range(5)}
    assert "and 16 more." in judge_connections(sheets, blocked, {}).fact


def test_hosts_where_gloo_listens_at_the_loopback() -> None:
    found = judge_connections(LOOPBACKS, BLOCKED, {0: "timed out after 30 s"})
    assert found.remedy == (
        "gloo listens at the loopback on a and b, where other hosts cannot reach it. Export "
        "GLOO_SOCKET_IFNAME=neta on a and GLOO_SOCKET_IFNAME=netb on b; or give each host's own name its true "
        "address in /etc/hosts."
    )


def test_the_loopback_is_right_on_a_single_host() -> None:
    sheets = job(*[sheet(gloo_address="127.0.0.1")] * 2)
    assert "loopback" not in judge_connections(sheets, BLOCKED, {0: "timed out"}).remedy


# ---------------------------------------------------------------------- collectives


def measured(latency_s: float, bytes_per_s: float, num_ranks: int = 2) -> dict[int, Measurement]:
    """Ranks that have measured this, as all do."""
    return {rank: Measurement(0.0, {"gloo": (latency_s, bytes_per_s)}) for rank in range(num_ranks)}


def test_a_speed_is_shown_with_what_it_means() -> None:
    (found,) = judge_collectives(measured(2e-4, 2e9), is_busy=False)
    assert found.severity is Severity.FINE
    assert found.fact == ("All-reduce by gloo: 0.20 ms, then 2.00 GB/s; 50 ms for 25 million float32 gradients.")


def test_a_single_rank_has_no_speed() -> None:
    (found,) = judge_collectives(measured(1e-6, 1e15, num_ranks=1), is_busy=False)
    assert "GB/s" not in found.fact


@pytest.mark.parametrize("slow", [(1e-4, 50e6), (20e-3, 2e9)], ids=["bandwidth", "latency"])
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_slow_network_unless_the_machine_is_busy(slow: tuple[float, float], is_busy: bool) -> None:
    found = judge_collectives(measured(*slow), is_busy)
    assert severities(found) == [Severity.NOTE]
    assert ("The machine is busy" if is_busy else "fastest network") in found[0].remedy
