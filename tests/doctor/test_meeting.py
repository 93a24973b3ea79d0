"""Getting to the store, past real sockets: nobody there, somebody else, no answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from minddp.doctor.meeting import CannotMeet, open_store
from minddp.doctor.place import Place

LIMIT_S = 1.5
LOCALHOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((LOCALHOST, 0)) as server:
        return int(server.getsockname()[1])


def obstacle(place: Place) -> str:
    """What stands in the way; the attempt must end near its time limit."""
    began = time.monotonic()
    with pytest.raises(CannotMeet) as failure:
        open_store(place, LIMIT_S)
    assert time.monotonic() - began < 20, "the time limit was far outlasted"
    return failure.value.attempt.obstacle


@contextmanager
def answering(what: bytes) -> Iterator[int]:
    """A server that says `what` to everybody, which is not what a store says; nothing, if it is empty."""
    with socket.create_server((LOCALHOST, 0)) as server:

        def serve() -> None:
            visitors = []
            with suppress(OSError):
                while True:
                    visitors.append(server.accept()[0])
                    visitors[-1].sendall(what)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_rank_0_hosts_the_store_and_the_others_find_it() -> None:
    port = free_port()
    host = open_store(Place(0, 2, LOCALHOST, port, hosts_store=True), 20.0)
    guest = open_store(Place(1, 2, "localhost", port), 20.0)
    host.store.set("greeting", "hello")
    assert guest.store.get("greeting") == b"hello"
    assert guest.own_address == LOCALHOST


def test_a_port_in_use() -> None:
    with socket.create_server(("", 0)) as server:
        assert obstacle(Place(0, 2, LOCALHOST, server.getsockname()[1], hosts_store=True)) == "port in use"


def test_nobody_listens() -> None:
    assert obstacle(Place(1, 2, LOCALHOST, free_port())) == "refused"


def test_a_name_without_an_address() -> None:
    assert obstacle(Place(1, 2, "no-such-host.invalid", 29500)) == "unknown name"


def test_packets_that_get_lost() -> None:
    """A listener whose queue is full: the kernel drops further attempts, as a firewall does."""
    with socket.create_server((LOCALHOST, 0), backlog=0) as server:
        port = server.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex((LOCALHOST, port))
        assert obstacle(Place(1, 2, LOCALHOST, port)) == "no answer"
        for one in waiting:
            one.close()


@pytest.mark.parametrize("what", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["a web server", "a silent one"])
def test_somebody_else_at_that_port(what: bytes) -> None:
    with answering(what) as port:
        assert obstacle(Place(1, 2, LOCALHOST, port)) == "no store"


def test_rank_0_whose_address_leads_elsewhere() -> None:
    """It hosts the store on all its own addresses; 127.0.0.2 would be one, so the name has to lead nowhere."""
    assert obstacle(Place(0, 2, "no-such-host.invalid", free_port(), hosts_store=True)) == "unknown name"


def test_waiting_is_told_with_its_reason() -> None:
    said: list[str] = []
    with pytest.raises(CannotMeet):
        open_store(Place(1, 2, LOCALHOST, free_port()), LIMIT_S, lambda why, waited_s: said.append(why))
    assert said
    assert set(said) == {"refused"}


def test_who_comes_late_is_waited_for() -> None:
    port = free_port()
    late: list[object] = []

    def come_late() -> None:
        time.sleep(1.0)
        late.append(open_store(Place(0, 2, LOCALHOST, port, hosts_store=True), 20.0))

    thread = threading.Thread(target=come_late)
    thread.start()
    assert open_store(Place(1, 2, LOCALHOST, port), 20.0).took_s > 0.4
    thread.join(20)
