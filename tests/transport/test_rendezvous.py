from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from minddp.transport.shared_memory import rendezvous, segments
from minddp.transport.shared_memory.host_communicator import HostCommunicator
from minddp.transport.shared_memory.rendezvous import CannotConnect, connect_ranks, gather_hosts, name_of_host
from tests.transport.threads import ThreadGroup, on_threads


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CONNECT_LIMIT_S", 1.0)


def connected_by(gather: Callable[[object], list[Any]], rank: int, world_size: int) -> HostCommunicator:
    gather_hosts(gather, name_of_host())
    return connect_ranks(gather, rank, range(world_size))


def outcome(group: ThreadGroup, rank: int) -> HostCommunicator | str:
    try:
        return connected_by(group.gather_on(rank), rank, group.world_size)
    except CannotConnect as obstacle:
        return str(obstacle)


def peers_of(hosts: list[HostCommunicator]) -> list[dict[int, Any]]:
    return [host._engine.peers._peers for host in hosts]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_every_rank_is_connected_with_every_other() -> None:
    group = ThreadGroup(4)
    hosts = on_threads(4, lambda rank: outcome(group, rank))
    for rank, others in enumerate(peers_of(hosts)):
        assert sorted(others) == [other for other in range(4) if other != rank]
        hosts[rank]._engine.begun.raise_to(10 + rank)
    assert all(host._engine.begun.behind(13) == [0, 1, 2] for host in hosts)
    for host in hosts:
        host.end()


@pytest.mark.parametrize("other", ["system", "processor"])
def test_only_linux_on_x86_will_do(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """Counters in shared memory need a processor that keeps the order of writes."""
    if other == "system":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(rendezvous, "ORDERS_WRITES", False)
    group = ThreadGroup(2)
    assert (
        on_threads(2, lambda rank: outcome(group, rank)) == ["rank 0 does not run on Linux on an x86 processor"] * 2
    )


@pytest.mark.parametrize("what", ["memory", "a listener"])
def test_what_one_rank_cannot_do_stops_all(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    create, bind, calls = segments.create, socket.socket.bind, []

    def fail_once() -> None:
        calls.append(what)
        if len(calls) == 1:
            raise OSError(1, "Operation not permitted")

    class Socket(socket.socket):
        def bind(self, address: Any) -> None:
            fail_once()
            bind(self, address)

    def create_once(nbytes: int) -> int:
        fail_once()
        return create(nbytes)

    if what == "memory":
        monkeypatch.setattr(segments, "create", create_once)
    else:
        monkeypatch.setattr(rendezvous.socket, "socket", Socket)
    before, group = num_descriptors(), ThreadGroup(3)
    outcomes = on_threads(3, lambda rank: outcome(group, rank))
    assert len(set(outcomes)) == 1
    assert "cannot share memory with the others" in outcomes[0]
    assert num_descriptors() == before


def test_a_process_without_the_token_is_rejected() -> None:
    group, strangers = ThreadGroup(2), []

    def gather_after_strangers(rank: int) -> Callable[[object], list[Any]]:
        gather = group.gather_on(rank)

        def visit(value: Any) -> list[Any]:
            if isinstance(value, tuple):
                address, token = value
                for greeting in (b"", b"hello", b"? 1", f"{'0' * len(token)} 1".encode()):
                    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    stranger.connect(bytes.fromhex(address))
                    stranger.send(greeting) if greeting else stranger.close()
                    strangers.append(stranger)
            return gather(value)

        return visit

    hosts = on_threads(2, lambda rank: connected_by(gather_after_strangers(rank), rank, 2))
    assert [list(others) for others in peers_of(hosts)] == [[1], [0]]
    assert len(strangers) == 8
    for closeable in strangers:
        closeable.close()
    for host in hosts:
        host.end()


def test_a_rank_that_reaches_another_process_stops_all() -> None:
    group = ThreadGroup(2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other_job:
        other_job.bind("")
        other_job.listen()

        def connect_elsewhere(rank: int) -> str:
            gather = group.gather_on(rank)

            def mislead(value: Any) -> list[Any]:
                return gather((other_job.getsockname().hex(), value[1]) if isinstance(value, tuple) else value)

            with pytest.raises(CannotConnect) as obstacle:
                connected_by(mislead, rank, 2)
            return str(obstacle.value)

        for obstacle in on_threads(2, connect_elsewhere):
            assert "cannot share memory with the others: " in obstacle


@pytest.mark.parametrize("can_be_watched", [True, False])
def test_processes_are_watched_if_the_system_can(monkeypatch: pytest.MonkeyPatch, can_be_watched: bool) -> None:
    if not can_be_watched:
        monkeypatch.delattr(os, "pidfd_open")
    group = ThreadGroup(2)
    hosts = on_threads(2, lambda rank: outcome(group, rank))
    for others in peers_of(hosts):
        assert [peer.process is not None for peer in others.values()] == [can_be_watched]
    for host in hosts:
        host.end()
