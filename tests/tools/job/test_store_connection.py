"""The way to the store, past real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from minddp.tools.job.place import Place
from minddp.tools.job.store_connection import StoreUnreachable, open_store, resolve

LIMIT_S = 1.5
LOCALHOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((LOCALHOST, 0)) as server:
        return int(server.getsockname()[1])


def obstacle(place: Place) -> str:
    """The obstacle to the connection; the attempt must end near its time limit."""
    began = time.monotonic()
    with pytest.raises(StoreUnreachable) as failure:
        open_store(place, LIMIT_S)
    assert time.monotonic() - began < 60, "the time limit was exceeded by far"
    return failure.value.obstacle


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """The port of a server that sends `answer`, if any, and is not a store."""
    with socket.create_server((LOCALHOST, 0)) as server:

        def serve() -> None:
            visitors = []
            with suppress(OSError):
                while True:
                    visitors.append(server.accept()[0])
                    visitors[-1].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_rank_0_hosts_the_store_and_a_rank_that_was_there_first_finds_it() -> None:
    port = free_port()
    hosted: list[object] = []

    def host_later() -> None:
        time.sleep(1.0)
        hosted.append(store := open_store(Place(0, 2, LOCALHOST, port, hosts_store=True), 20.0))
        store.set("greeting", "hello")

    thread = threading.Thread(target=host_later)
    thread.start()
    assert open_store(Place(1, 2, "localhost", port), 20.0).get("greeting") == b"hello"
    thread.join(60)


def test_a_port_in_use() -> None:
    with socket.create_server(("", 0)) as server:
        place = Place(0, 2, LOCALHOST, server.getsockname()[1], hosts_store=True)
        assert obstacle(place).startswith("cannot listen: ")


def test_a_port_at_which_nothing_listens() -> None:
    assert "Connection refused" in obstacle(Place(1, 2, LOCALHOST, free_port()))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_without_an_address(rank: int) -> None:
    """Rank 0, too: its own store listens, but the others would not find it."""
    place = Place(rank, 2, "no-such-host.invalid", free_port(), hosts_store=rank == 0)
    assert "[Errno -" in obstacle(place)  # a resolver's


def test_packets_that_get_lost() -> None:
    """A listener whose queue is full: the kernel drops further attempts, as a firewall does."""
    with socket.create_server((LOCALHOST, 0), backlog=0) as server:
        port = server.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex((LOCALHOST, port))
        assert "timed out" in obstacle(Place(1, 2, LOCALHOST, port))
        for one in waiting:
            one.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["a web server", "a silent one"])
def test_another_service_at_that_port(answer: bytes) -> None:
    with answering(answer) as port:
        assert obstacle(Place(1, 2, LOCALHOST, port)).startswith("no store answers: ")


def test_names_are_resolved() -> None:
    assert LOCALHOST in resolve("localhost", 20.0)
    with pytest.raises(OSError):
        resolve("no-such-host.invalid", 20.0)
