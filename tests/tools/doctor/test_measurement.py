"""Facts of this process, where gloo listens, and parts that run on every rank: ranks are threads or processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minddp.platform.store import Messages
from minddp.tools.doctor import measurement
from minddp.tools.doctor.measurement import address_of_gloo, collect, run_on_all

INTERFACES = {
    "lo": [SimpleNamespace(address="127.0.0.3"), SimpleNamespace(address="00:00:00:00:00:00")],
    "eth0": [SimpleNamespace(address="00:00:00:00:00:01")],
}


def test_the_sheet_of_this_process() -> None:
    environment = {"HOME": "/", "RANK": "0", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "x"}
    sheet = collect(torch.device("cpu"), environment, 5.0)
    assert sheet.settings["torch"] == torch.__version__
    assert list(sheet.settings)[-3:] == ["device", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG"]
    assert sheet.address == "no address", "no interface is called x"


@pytest.mark.parametrize(
    ("interface", "name_addresses", "address"),
    [
        ("lo", ("127.0.0.2",), "127.0.0.3"),
        ("eth0", ("127.0.0.2",), "no address"),  # it has no address that can be bound
        ("eth7", ("127.0.0.2",), "no address"),
        ("", ("127.0.0.2",), "127.0.0.2"),
        ("", ("192.0.2.77", "127.0.0.2"), "127.0.0.2"),  # the first cannot be bound here
        ("", None, "127.0.0.1"),
    ],
)
def test_where_gloo_will_listen(
    interface: str, name_addresses: tuple[str, ...] | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str, limit_s: float) -> tuple[str, ...]:
        if name_addresses is None:
            raise OSError("the host's own name has no address")
        return name_addresses

    monkeypatch.setattr(measurement, "resolve", resolve)
    monkeypatch.setattr(measurement.psutil, "net_if_addrs", lambda: INTERFACES)
    assert address_of_gloo(interface, 5.0) == address


# ---------------------------------------------------------------------- parts that run on every rank


def outcomes(part: Callable[[int], Any], limit_s: float = 20.0, present: int = 3) -> list[Any]:
    """What `run_on_all` returns to the present ranks, of three."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        return run_on_all(Messages(store, "test", rank, 3), lambda: part(rank), limit_s)

    with ThreadPoolExecutor(present) as threads:
        return list(threads.map(run, range(present)))


def test_every_rank_gets_its_value_and_the_errors_of_all() -> None:
    errors = {0: "ZeroDivisionError: integer division or modulo by zero"}
    assert outcomes(lambda rank: rank * 10) == [(0, {}), (10, {}), (20, {})]
    assert outcomes(lambda rank: 6 // rank) == [(None, errors), (6, errors), (3, errors)]


def test_a_part_has_a_time_limit() -> None:
    never = threading.Event()
    errors = {1: "TimeoutError: timed out after 0.5 s"}
    found = outcomes(lambda rank: never.wait() if rank == 1 else rank, 0.5)
    assert found == [(0, errors), (None, errors), (2, errors)]
    never.set()


def test_a_silent_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "MARGIN_S", 0.5)
    assert outcomes(lambda rank: rank, 0.5, present=2) == [(0, {2: "no answer"}), (1, {2: "no answer"})]
