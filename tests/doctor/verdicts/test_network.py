"""Interfaces, addresses and connections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from minddp.doctor.board import Outcome
from minddp.doctor.facts import Interface
from minddp.doctor.findings import Verdict
from minddp.doctor.verdicts.network import cut_off, judge_interfaces, judge_network
from tests.doctor.made_up import done, job, rank, rank_on, told, verdicts

ONE_HOST = job(rank(0), rank(1))
TWO_HOSTS = job(rank_on(0, "a", "10.0.0.1"), rank_on(1, "b", "10.0.0.2"))
LOOPBACKS = job(rank_on(0, "a", "127.0.1.1"), rank_on(1, "b", "127.0.1.1"))
OPEN = done({0: {"1": ""}, 1: {"0": ""}})
SHUT = done({0: {"1": "refused"}, 1: {"0": "no answer"}})
CONNECTED = done({0: "connected", 1: "connected"})


def with_variable(name: str, value: str) -> Any:
    return job(*(rank(number, software={"environment": {name: value}}) for number in range(2)))


# ---------------------------------------------------------------------- interfaces


def test_where_gloo_listens() -> None:
    (found,) = judge_interfaces(TWO_HOSTS, on_gpu=False)
    assert found.verdict is Verdict.FINE
    assert found.fact == "gloo listens at 10.0.0.1 (neta, a), 10.0.0.2 (netb, b)."


@pytest.mark.parametrize("wanted", ["eth7", "eth0,eth7"])
def test_a_gloo_interface_that_does_not_exist(wanted: str) -> None:
    found = judge_interfaces(with_variable("GLOO_SOCKET_IFNAME", wanted), on_gpu=False)
    assert verdicts(found) == [Verdict.BROKEN]
    assert f"GLOO_SOCKET_IFNAME={wanted} on a (ranks 0, 1), but eth7 does not exist there." in found[0].fact
    assert "There are lo, eth0." in found[0].fact


def test_a_gloo_interface_that_is_down() -> None:
    facts = job(
        rank(
            0,
            software={"environment": {"GLOO_SOCKET_IFNAME": "eth0"}},
            network={"interfaces": {"eth0": Interface(("10.0.0.1",), is_up=False)}},
        )
    )
    found = judge_interfaces(facts, on_gpu=False)
    assert verdicts(found) == [Verdict.BROKEN]
    assert "eth0 is down" in found[0].fact


@pytest.mark.parametrize(
    ("pattern", "on_gpu", "verdict"),
    [
        ("eth", True, Verdict.FINE),
        ("=eth0,eth1", True, Verdict.FINE),
        ("^docker", True, Verdict.FINE),
        ("=eth", True, Verdict.BROKEN),
        ("ib", True, Verdict.BROKEN),
        ("^lo,eth", True, Verdict.BROKEN),
        ("ib", False, Verdict.NOTE),
    ],
)
def test_nccl_interfaces(pattern: str, on_gpu: bool, verdict: Verdict) -> None:
    assert verdicts(judge_interfaces(with_variable("NCCL_SOCKET_IFNAME", pattern), on_gpu)) == [verdict]


# ---------------------------------------------------------------------- connections


def judged(facts: Any, reached: Mapping[int, Outcome], connected: Mapping[int, Outcome] = CONNECTED) -> Any:
    return judge_network(facts, reached, connected, took_s=0.5)


def test_all_connected() -> None:
    (found,) = judged(TWO_HOSTS, OPEN)
    assert found.verdict is Verdict.FINE
    assert found.fact == "2 ranks connected in 0.5 s, and ones added up to 2."


def test_ranks_that_cannot_reach_each_other_are_cut_off() -> None:
    assert cut_off(SHUT) == [(0, 1)]
    found = judged(TWO_HOSTS, SHUT, {})
    assert verdicts(found) == [Verdict.BROKEN]
    assert (
        "rank 1 on b at 10.0.0.2 and rank 0 on a at 10.0.0.1 (no answer; the other way round: refused)"
        in found[0].fact
    )
    assert "any TCP port" in found[0].remedy


def test_hosts_whose_names_lead_to_the_loopback() -> None:
    found = judged(LOOPBACKS, SHUT, {})
    assert verdicts(found) == [Verdict.BROKEN]
    assert found[0].remedy == (
        "a, b would have the others come to 127.0.1.1, which leads every host to itself. Export "
        "GLOO_SOCKET_IFNAME=neta on a, GLOO_SOCKET_IFNAME=netb on b; or give each host's own name its true address "
        "in /etc/hosts."
    )


def test_the_loopback_is_right_on_a_single_host() -> None:
    facts = job(*(rank(number, network={"gloo_address": "127.0.0.1"}) for number in range(2)))
    assert verdicts(judged(facts, OPEN)) == [Verdict.FINE]
    assert "127.0.0.1" not in told(judged(facts, SHUT, {})).partition("->")[2]


def test_one_way_is_worth_knowing_if_gloo_went_the_other() -> None:
    one_way = done({0: {"1": "refused"}, 1: {"0": ""}})
    assert cut_off(one_way) == []
    facts = job(rank_on(0, "a", "10.0.0.1"), rank_on(1, "b", "127.0.1.1"))
    found = judged(facts, one_way)
    assert verdicts(found) == [Verdict.NOTE, Verdict.FINE]
    assert "Rank 0 on a at 10.0.0.1 cannot connect to rank 1 on b at 127.0.1.1 (refused)" in found[0].fact
    assert "GLOO_SOCKET_IFNAME=netb on b" in found[0].remedy


def test_many_pairs_are_not_all_listed() -> None:
    facts = job(*(rank_on(number, f"h{number}", f"10.0.0.{number + 1}") for number in range(5)))
    shut = done({i: {str(j): "no route" for j in range(5) if j != i} for i in range(5)})
    (found,) = judged(facts, shut, {})
    assert "and 6 more pairs" in found.fact


def test_a_group_that_cannot_be_made_names_who_failed_and_not_who_gave_up() -> None:
    connected = {0: Outcome("failed", error="RuntimeError: Connection refused"), 1: Outcome("abandoned")}
    found = judged(TWO_HOSTS, OPEN, connected)
    assert verdicts(found) == [Verdict.BROKEN]
    assert "could not be made on rank 0: RuntimeError: Connection refused." in found[0].fact


def test_a_rank_that_cannot_listen() -> None:
    reached = {0: Outcome("abandoned"), 1: Outcome("failed", error="OSError: cannot assign requested address")}
    assert cut_off(reached) == []
    found = judged(TWO_HOSTS, reached, {})
    assert verdicts(found) == [Verdict.BROKEN]
    assert "Rank 1 on b cannot listen at 10.0.0.2" in found[0].fact


def test_a_rank_that_falls_silent_while_others_knock() -> None:
    found = judged(TWO_HOSTS, {0: Outcome("out of time", error="no end"), 1: Outcome("silent")}, {})
    assert verdicts(found) == [Verdict.BROKEN]
    assert "on rank 1: it fell silent" in found[0].fact
