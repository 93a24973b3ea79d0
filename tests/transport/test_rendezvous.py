from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from minddp.transport.shared_memory import messages, rendezvous, segments
from minddp.transport.shared_memory.messages import ChunksDone
from minddp.transport.shared_memory.peer_sockets import Peer
from minddp.transport.shared_memory.rendezvous import CannotConnect, connect, gather_hosts, name_of_host
from tests.transport.threads import ThreadGroup, on_threads


def connected_by(group: ThreadGroup, rank: int, timeout_s: float = 5.0) -> dict[int, Peer]:
    gather_hosts(group.of(rank), name_of_host())
    return connect(group.of(rank), range(group.world_size), timeout_s)


def outcome(group: ThreadGroup, rank: int, timeout_s: float = 5.0) -> dict[int, Peer] | str:
    try:
        return connected_by(group, rank, timeout_s)
    except CannotConnect as obstacle:
        return str(obstacle)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_every_rank_is_connected_with_every_other() -> None:
    group = ThreadGroup(4)
    peers = on_threads(4, lambda rank: connected_by(group, rank))
    for rank, others in enumerate(peers):
        assert sorted(others) == [other for other in range(4) if other != rank]
        for other, peer in others.items():
            messages.send(peer.socket, ChunksDone(10 * rank + other))
    for rank, others in enumerate(peers):
        for other, peer in others.items():
            assert next(messages.receive(peer.socket)) == (ChunksDone(10 * other + rank), [])
            peer.close()


def test_a_system_without_memfd_is_an_obstacle_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    group = ThreadGroup(2)
    assert on_threads(2, lambda rank: outcome(group, rank)) == ["rank 0 does not run on Linux"] * 2


def test_what_one_rank_cannot_do_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    create, calls = segments.create, []

    def create_once(nbytes: int) -> int:
        calls.append(nbytes)
        if len(calls) == 2:
            raise OSError(1, "Operation not permitted")
        return create(nbytes)

    monkeypatch.setattr(segments, "create", create_once)
    before, group = num_descriptors(), ThreadGroup(3)
    outcomes = on_threads(3, lambda rank: outcome(group, rank, timeout_s=1.0))
    assert len(set(outcomes)) == 1
    assert "cannot share memory with the others" in outcomes[0]
    assert num_descriptors() == before


def test_a_process_without_the_token_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    gather, strangers = rendezvous.gather_json, []

    def gather_after_strangers(group: Any, value: Any) -> list[Any]:
        if "token" in value:
            for greeting in (b"", b"hello", b"? 1", f"{'0' * len(value['token'])} 1".encode()):
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stranger.connect(bytes.fromhex(value["address"]))
                stranger.send(greeting) if greeting else stranger.close()
                strangers.append(stranger)
        return gather(group, value)

    monkeypatch.setattr(rendezvous, "gather_json", gather_after_strangers)
    group = ThreadGroup(2)
    for others in on_threads(2, lambda rank: connected_by(group, rank)):
        assert len(others) == 1
        [peer] = others.values()
        peer.close()
    assert len(strangers) == 8
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_reaches_another_process_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = rendezvous.gather_json
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other_job:
        other_job.bind("")
        other_job.listen()

        def gather_a_wrong_address(group: Any, value: Any) -> list[Any]:
            if "token" in value:
                value = {**value, "address": other_job.getsockname().hex()}
            return gather(group, value)

        monkeypatch.setattr(rendezvous, "gather_json", gather_a_wrong_address)
        group = ThreadGroup(2)
        for obstacle in on_threads(2, lambda rank: outcome(group, rank, timeout_s=0.5)):
            assert "rank 0 cannot share memory with the others: timed out" in obstacle


def test_processes_can_be_watched() -> None:
    group = ThreadGroup(2)
    peers = on_threads(2, lambda rank: connected_by(group, rank))
    for others in peers:
        for peer in others.values():
            assert (peer.process is not None) == hasattr(os, "pidfd_open")
            peer.close()


def test_processes_that_cannot_be_watched_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    group = ThreadGroup(2)
    for others in on_threads(2, lambda rank: connected_by(group, rank)):
        for peer in others.values():
            assert peer.process is None
            peer.close()
