"""Connections between ranks that are threads, and measurements between ranks that are processes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from minddp.platform.store import Messages
from minddp.tools.doctor.measurement import Measurement, measure, probe_connections
from tests.ranks import RankPool

ADDRESS = "127.0.0.1"


def test_every_rank_connects_to_every_other() -> None:
    store = dist.HashStore()

    def probe(rank: int) -> dict[int, str]:
        return probe_connections(Messages(store, "test", rank, 3), ADDRESS, 20.0)

    with ThreadPoolExecutor(3) as threads:
        probed = list(threads.map(probe, range(3)))
    assert probed == [{}, {}, {}]


def test_a_rank_that_refuses_connections_and_one_that_does_not_listen() -> None:
    store = dist.HashStore()
    prober, refusing, missing = (Messages(store, "test", rank, 3) for rank in range(3))
    refusing.post((ADDRESS, 1), "listening")  # the port of a service that hardly any host runs
    for messages in (refusing, missing):
        messages.post(True, "probed")
    began = time.monotonic()
    probed = probe_connections(prober, ADDRESS, 0.5)
    assert probed == {1: "refused", 2: "not listening"}
    assert time.monotonic() - began < 20


def measure_here(rank: int) -> Measurement:
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    return measure(Messages(store, "test", rank, 2), torch.device("cpu"), 60.0)


def test_times_are_measured_by_each_transport() -> None:
    pool = RankPool(2)
    try:
        measured = pool.run(measure_here)
    finally:
        pool.kill()
    for measurement in measured:
        assert 0 <= measurement.waited < 1
        assert list(measurement.links) == ["gloo", "shared memory"]
        assert min(number for link in measurement.links.values() for number in link) > 0
