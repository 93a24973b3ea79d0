"""Opening connections between ranks that are threads here."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from minddp.doctor.board import Board
from minddp.doctor.reach import knock_at_all

ADDRESS = "127.0.0.1"


def test_everybody_reaches_everybody() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        reached = list(threads.map(lambda rank: knock_at_all(Board(store, rank, 3), ADDRESS, 20.0), range(3)))
    assert reached == [{"1": "", "2": ""}, {"0": "", "2": ""}, {"0": "", "1": ""}]


def test_a_door_that_nobody_opens_and_one_that_is_shut() -> None:
    store = dist.HashStore()
    shut, missing = Board(store, 1, 3), Board(store, 2, 3)
    shut.post("door", [ADDRESS, 1])  # the port of a service that hardly anybody runs
    for board in (shut, missing):
        board.post("knocked", True)
    began = time.monotonic()
    assert knock_at_all(Board(store, 0, 3), ADDRESS, 0.5) == {"1": "refused", "2": "did not open a door"}
    assert time.monotonic() - began < 20
