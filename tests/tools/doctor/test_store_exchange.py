"""Messages through a store. The ranks are threads, the store is in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from minddp.tools.doctor.store_exchange import SILENT, StoreExchange

RANKS = 3


def on_each_rank(body: Callable[[StoreExchange], Any], ranks: range = range(RANKS)) -> list[Any]:
    """`body(exchange)` on threads that share a store; the results in the order of ranks."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank: body(StoreExchange(store, rank, RANKS)), ranks))


def test_every_rank_gets_the_messages_of_all() -> None:
    def body(exchange: StoreExchange) -> Any:
        exchange.post("sheet", {"rank": exchange.rank})
        return exchange.gather("sheet", 20.0)

    assert on_each_rank(body) == [{rank: {"rank": rank} for rank in range(RANKS)}] * RANKS


def test_a_rank_that_posts_nothing_is_missing() -> None:
    def body(exchange: StoreExchange) -> Any:
        exchange.post("sheet", 1)
        return exchange.gather("sheet", 0.5), exchange.gather("sheet", 20.0, ranks=[0])

    assert on_each_rank(body, range(2)) == [({0: 1, 1: 1}, {0: 1})] * 2


def test_every_rank_gets_the_values_of_all() -> None:
    outcomes = on_each_rank(lambda exchange: exchange.run_on_all("work", lambda: exchange.rank * 10, 20.0))
    assert outcomes == [({0: 0, 1: 10, 2: 20}, {})] * RANKS


def test_when_one_rank_fails_the_others_give_up_and_its_error_is_the_one_to_look_at() -> None:
    never = threading.Event()

    def body(exchange: StoreExchange) -> Any:
        return exchange.run_on_all("work", lambda: never.wait() if exchange.rank else 1 // 0, 60.0)

    error = "ZeroDivisionError: integer division or modulo by zero"
    assert on_each_rank(body) == [({}, {0: error})] * RANKS
    never.set()


def test_when_one_rank_is_out_of_time_the_others_give_up() -> None:
    never = threading.Event()

    def body(exchange: StoreExchange) -> Any:
        return exchange.run_on_all("work", never.wait, 60.0 if exchange.rank else 0.5)

    assert on_each_rank(body) == [({}, {0: "timed out after 0.5 s"})] * RANKS
    never.set()


def test_a_silent_rank_is_named_before_those_that_fail_because_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minddp.tools.doctor.store_exchange.FAREWELL_S", 1.0)

    def body(exchange: StoreExchange) -> Any:
        return exchange.run_on_all("work", lambda: 1 // exchange.rank, 1.0)

    for values, errors in on_each_rank(body, range(2)):
        assert 2 not in values
        assert errors == {2: SILENT}
