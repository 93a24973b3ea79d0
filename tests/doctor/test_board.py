"""What ranks tell each other through a store. The ranks are threads, the store is in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from minddp.doctor.board import Board, Outcome, StoreLost, is_done, to_blame

RANKS = 3


def on_each_rank(body: Callable[[Board], Any], ranks: range = range(RANKS)) -> list[Any]:
    """`body(board)` on threads that share a store; the results in rank order."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank: body(Board(store, rank, RANKS)), ranks))


def test_all_see_what_all_post() -> None:
    def body(board: Board) -> Any:
        board.post("facts", {"rank": board.rank})
        return board.gather("facts", 20.0)

    everything = {rank: {"rank": rank} for rank in range(RANKS)}
    assert on_each_rank(body) == [everything] * RANKS


def test_who_posts_nothing_is_missing_and_named_meanwhile() -> None:
    missing: list[list[int]] = []

    def body(board: Board) -> Any:
        board.post("facts", 1)
        return board.gather("facts", 0.5, lambda ranks, waited_s: missing.append(ranks))

    assert on_each_rank(body, range(2)) == [{0: 1, 1: 1}] * 2
    assert missing[-1] == [2]


def test_a_rank_can_be_claimed_once() -> None:
    store = dist.HashStore()
    assert [Board(store, 1, RANKS).claim(), Board(store, 2, RANKS).claim(), Board(store, 1, RANKS).claim()] == [
        True,
        True,
        False,
    ]


def test_a_part_that_all_do() -> None:
    outcomes = on_each_rank(lambda board: board.together("work", lambda: board.rank * 10, 20.0))
    assert outcomes == [{rank: Outcome("done", rank * 10) for rank in range(RANKS)}] * RANKS
    assert is_done(outcomes[0])


def test_when_one_fails_the_others_stop_waiting_for_it() -> None:
    never = threading.Event()

    def body(board: Board) -> Any:
        return board.together("work", lambda: never.wait() if board.rank else 1 // 0, 60.0)

    for outcomes in on_each_rank(body):
        assert not is_done(outcomes)
        assert [outcome.ended for outcome in outcomes.values()] == ["failed", "abandoned", "abandoned"]
        assert to_blame(outcomes) == {
            0: Outcome("failed", error="ZeroDivisionError: integer division or modulo by zero")
        }
    never.set()


def test_when_one_is_out_of_time_the_others_stop_too() -> None:
    never = threading.Event()

    def body(board: Board) -> Any:
        return board.together("work", never.wait, 60.0 if board.rank else 0.5)

    for outcomes in on_each_rank(body):
        assert [outcome.ended for outcome in outcomes.values()] == ["out of time", "abandoned", "abandoned"]
    never.set()


def test_who_is_to_blame_is_who_fell_silent_first_of_all() -> None:
    silent, failed, late = (
        Outcome("silent"),
        Outcome("failed", error="no peer"),
        Outcome("out of time", error="no end"),
    )
    assert to_blame({0: failed, 1: silent, 2: late}) == {1: silent}
    assert to_blame({0: failed, 1: late}) == {0: failed}
    assert to_blame({0: late, 1: Outcome("done", 1)}) == {0: late}


def test_a_rank_that_dies_in_its_part_is_silent() -> None:
    """It is not there at all: the others are out of time, and then wait for what it says."""
    for outcomes in on_each_rank(lambda board: board.together("work", lambda: board.rank, 0.5), range(2)):
        assert [outcome.ended for outcome in outcomes.values()] == ["done", "done", "silent"]


def test_a_store_that_has_gone() -> None:
    class Gone(dist.Store):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset\nframe #0: somewhere in C++")

    with pytest.raises(StoreLost, match=r"^Connection reset$"):
        Board(Gone(), 0, 1).gather("facts", 20.0)
