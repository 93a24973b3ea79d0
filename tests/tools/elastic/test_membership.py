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
from minddp.tools.elastic.membership import Generation, Membership, next_generation
from minddp.tools.elastic.term import Connections


@given(st.lists(st.booleans(), max_size=5), st.integers(0, 5))
def test_survivors_keep_their_order_and_the_first_one_has_the_state(have_state: list[bool], num_new: int) -> None:
    last = Generation(4, tuple(range(len(have_state) + 1)))  # the last one of them is lost
    requests = {10 + place: False for place in range(num_new)} | dict(enumerate(have_state))
    if not requests:
        return
    found = next_generation(last, requests)
    survivors = tuple(place for place in range(len(have_state)) if have_state[place])
    assert found.number == 5
    assert sorted(found.members) == sorted(requests)
    assert found.members[: len(survivors)] == survivors
    assert found.joined == (found.members[len(survivors) :] if survivors else found.members[1:])


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_requests_to_join_are_found_in_order(store: dist.Store) -> None:
    one, other = Membership(store), Membership(store)
    other.member = 1
    assert one.join_requests(1) == {}
    other.request_join(1, has_state=True)
    one.request_join(1, has_state=False)
    one.request_join(2, has_state=True)
    assert list(one.join_requests(1).items()) == [(1, True), (os.getpid(), False)]


# ---------------------------------------------------------------------- what a session needs


def test_a_session_needs_its_launcher_and_logical_ranks(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="MINDDP_ELASTIC_PORT is not set"):
        minddp.elastic.join()
    monkeypatch.setenv("MINDDP_ELASTIC_PORT", str(store.port))
    monkeypatch.setenv("MINDDP_ELASTIC_RANKS", "3")
    session = minddp.elastic.join()
    try:
        with pytest.raises(ValueError, match="default process group twice"):
            minddp.elastic.join()
        for num_shares, message in ((None, "only with logical_ranks"), (2, "2 logical ranks cannot be dealt to 3")):
            ddp = minddp.DistributedDataParallel(nn.Linear(2, 2), logical_ranks=num_shares)
            with pytest.raises(ValueError, match=message):
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
