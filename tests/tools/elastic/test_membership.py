"""Which ranks train together: decisions without ranks, and the store's part with one process."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import minddp
from minddp.tools.elastic.connections import Connections
from minddp.tools.elastic.membership import Generation, JoinRequest, Membership, next_generation

STEPS = st.lists(st.integers(0, 3), max_size=5)


@given(STEPS, st.lists(st.booleans(), min_size=5, max_size=5), STEPS)
def test_survivors_keep_their_order_and_the_furthest_member_is_the_source(
    of_last: list[int], have_state: list[bool], of_new: list[int]
) -> None:
    last = Generation(4, tuple(range(len(of_last) + 1)))  # the last one of them is lost
    requests = {10 + place: JoinRequest(step, False) for place, step in enumerate(of_new)}
    requests |= {place: JoinRequest(step, have_state[place]) for place, step in enumerate(of_last)}
    if not requests:
        return
    found = next_generation(last, requests, 6)
    survivors = tuple(place for place in range(len(of_last)) if have_state[place])
    assert found.number == 5
    assert len(found.members) == min(6, len(requests))
    assert found.members[: len(survivors)] == survivors
    assert set(found.joined) == set(found.members) - set(survivors)
    assert found.source in (survivors or found.members)
    assert requests[found.source].step == max(requests[member].step for member in survivors or found.members)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_one_proposal_wins_and_all_read_it(store: dist.Store) -> None:
    one, other = Membership(store), Membership(store)
    assert (one.member, other.member) == (1, 2)
    assert one.decided(1) is None
    one.propose(Generation(1, (1,)))
    other.propose(Generation(1, (2,)))
    assert one.decided(1) == other.decided(1) == Generation(1, (1,))


def test_requests_to_join_are_found_in_order(store: dist.Store) -> None:
    one, other = Membership(store), Membership(store)
    assert one.join_requests(1) == {}
    other.request_join(1, 3, has_state=True)
    one.request_join(1, 0, has_state=False)
    one.request_join(2, 4, has_state=True)
    assert list(one.join_requests(1).items()) == [(2, JoinRequest(3, True)), (1, JoinRequest(0, False))]


def test_a_process_of_this_host_that_is_gone_is_known_and_one_elsewhere_is_not(store: dist.Store) -> None:
    membership, gone, elsewhere = Membership(store), Membership(store), Membership(store)
    child = os.fork()
    if child == 0:
        os._exit(0)
    gone._messages.post((gone.processes.host, child), "process")
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a zombie
    elsewhere._messages.post(("another host", child), "process")
    here = [membership.processes.has_ended(member) for member in (1, 2, 3)]
    os.waitpid(child, 0)
    assert here == [False, True, False]


# ---------------------------------------------------------------------- what a session needs


def test_a_session_needs_its_launcher_and_logical_ranks(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="MINDDP_ELASTIC_STORE is not set"):
        minddp.elastic.join()
    monkeypatch.setenv("MINDDP_ELASTIC_STORE", f"localhost:{store.port}")
    session = minddp.elastic.join()
    try:
        with pytest.raises(ValueError, match="default process group twice"):
            minddp.elastic.join()
        ddp = minddp.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="logical_ranks"):
            next(session.steps(ddp, torch.optim.SGD(ddp.parameters(), 0.1), last=1))
    finally:
        session.leave()
        dist.destroy_process_group()


# ---------------------------------------------------------------------- connections


def test_hanging_up_ends_a_wait_and_spares_other_sockets() -> None:
    before = socket.socketpair()
    connections = Connections()
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    connections.complete()
    after = socket.socketpair()
    received: list[bytes] = []
    waiting = threading.Thread(target=lambda: received.append(ours.recv(1)), daemon=True)
    waiting.start()
    connections.hang_up()
    waiting.join(5)
    assert received == [b""]
    assert theirs.recv(1) == b""
    for one, other in (before, after):
        one.send(b"x")
        assert other.recv(1) == b"x"
    with socket.create_connection(listener.getsockname()):  # gloo's thread would accept from it for ever
        pass


def test_sockets_are_recorded_until_complete() -> None:
    connections = Connections()
    ours, _theirs = socket.socketpair()
    connections.hang_up()
    assert ours.recv(1) == b""
