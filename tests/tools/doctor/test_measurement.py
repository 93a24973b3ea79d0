"""Connections between ranks that are threads, and measurements between ranks that are processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from minddp.tools.doctor.measurement import Measurement, measure, probe_connections
from minddp.tools.doctor.store_exchange import StoreExchange
from tests.ranks import RankPool

ADDRESS = "127.0.0.1"


def test_every_rank_connects_to_every_other() -> None:
    store = dist.HashStore()

    def probe(rank: int) -> dict[str, str]:
        return probe_connections(StoreExchange(store, rank, 3), ADDRESS, 20.0)

    with ThreadPoolExecutor(3) as threads:
        probed = list(threads.map(probe, range(3)))
    assert probed == [{"1": "", "2": ""}, {"0": "", "2": ""}, {"0": "", "1": ""}]


def test_a_rank_that_refuses_connections_and_one_that_does_not_listen() -> None:
    store = dist.HashStore()
    refusing, missing = StoreExchange(store, 1, 3), StoreExchange(store, 2, 3)
    refusing.post("listening", [ADDRESS, 1])  # the port of a service that hardly any host runs
    for exchange in (refusing, missing):
        exchange.post("probed", True)
    began = time.monotonic()
    probed = probe_connections(StoreExchange(store, 0, 3), ADDRESS, 0.5)
    assert probed == {"1": "refused", "2": "not listening"}
    assert time.monotonic() - began < 20


def measure_here(rank: int) -> Measurement:
    return measure(torch.device("cpu"))


def test_times_are_measured_by_each_transport(ranks: Callable[[int], RankPool]) -> None:
    for measurement in ranks(2).run(measure_here):
        assert 0 <= measurement.waited < 1
        assert list(measurement.links) == ["gloo", "shared memory"]
        assert min(number for link in measurement.links.values() for number in link) > 0
