from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch

from minddp.transport.shared_memory import messages
from minddp.transport.shared_memory.messages import (
    MAX_REASON_CHARACTERS,
    AddendReady,
    ChunksDone,
    Ended,
    Leaving,
    SegmentCreated,
    SegmentDropped,
    WakeUp,
)

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield here, there
    here.close()
    there.close()


@pytest.mark.parametrize(
    "message",
    [
        SegmentCreated(3, 2**40),
        SegmentDropped(2**33),
        AddendReady(1, 2, 3, 2**50, torch.bfloat16),
        ChunksDone(2**40),
        WakeUp(),
        Leaving("é"),
        Leaving(""),
    ],
)
def test_messages_arrive_as_they_were_sent(ends: Ends, message: messages.Message) -> None:
    assert messages.send(ends[0], message)
    [(received, descriptors)] = messages.receive(ends[1])
    assert received == message
    assert type(received) is type(message)
    assert descriptors == []


def test_the_longest_reason_fits_into_a_message(ends: Ends) -> None:
    longest = Leaving("\N{HUGGING FACE}" * MAX_REASON_CHARACTERS)
    assert messages.send(ends[0], longest)
    assert list(messages.receive(ends[1])) == [(longest, [])]


def test_a_descriptor_comes_along_and_is_not_inherited(ends: Ends) -> None:
    read, write = os.pipe()
    messages.send(ends[0], SegmentCreated(0, 1), [write])
    [(_, [received])] = messages.receive(ends[1])
    os.write(received, b"x")
    assert os.read(read, 1) == b"x"
    assert not os.get_inheritable(received)
    for descriptor in (read, write, received):
        os.close(descriptor)


def test_nothing_there_is_not_the_end(ends: Ends) -> None:
    assert list(messages.receive(ends[1])) == []


def test_messages_sent_before_the_end_are_received(ends: Ends) -> None:
    messages.send(ends[0], ChunksDone(7))
    ends[0].close()
    assert list(messages.receive(ends[1])) == [(ChunksDone(7), []), (Ended(), [])]


def test_the_last_message_is_received_from_a_peer_that_has_not_read_ours(ends: Ends) -> None:
    messages.send(ends[1], ChunksDone(1))
    messages.send(ends[0], Leaving("tired"))
    ends[0].close()
    assert list(messages.receive(ends[1])) == [(Leaving("tired"), []), (Ended(), [])]


def test_sending_to_a_peer_that_has_ended_succeeds(ends: Ends) -> None:
    ends[1].close()
    assert messages.send(ends[0], ChunksDone(1))


def test_sending_to_a_peer_that_does_not_read_has_a_time_limit(ends: Ends) -> None:
    while messages.send(ends[0], ChunksDone(1)):
        pass
    assert not messages.send(ends[0], ChunksDone(1), timeout_s=0.05)
    assert not messages.send(ends[0], SegmentCreated(0, 1), [ends[0].fileno()], timeout_s=0.05)
    next(messages.receive(ends[1]))
    assert messages.send(ends[0], ChunksDone(1), timeout_s=5.0)
