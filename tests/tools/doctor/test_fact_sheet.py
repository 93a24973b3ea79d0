"""The fact sheet of this process, and where gloo will listen."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from minddp.tools.doctor.fact_sheet import (
    FactSheet,
    choose_gloo_address,
    collect,
    list_interfaces,
    outward,
    relevant,
)
from minddp.tools.job.place import Place

INTERFACES = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.0.2.77"]}


def test_a_sheet_is_plain_data() -> None:
    sheet = collect(Place(1, 2, "localhost", 29500, local_rank=1), {"NCCL_DEBUG": "WARN"}, 10.0)
    assert sheet.versions["torch"] == torch.__version__
    assert sheet.environment == {"NCCL_DEBUG": "WARN"}
    assert sheet.gloo_address is not None
    assert FactSheet(**json.loads(json.dumps(asdict(sheet)))) == sheet  # as --json writes it


def test_variables_that_change_how_ranks_compute_or_communicate() -> None:
    environment = {
        "HOME": "/",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # torchrun sets it
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "2",
        "NCCL_ALGO": "Ring",
        "RANK": "0",
    }
    assert relevant(environment) == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2"}


def test_the_loopback_exists_and_leads_to_no_other_host() -> None:
    interfaces = list_interfaces()
    assert any("127.0.0.1" in addresses for addresses in interfaces.values())
    assert not any(address.startswith("127.") for address in outward(interfaces).values())
    assert outward(INTERFACES) == {"eth0": "192.0.2.77"}


@pytest.mark.parametrize(
    ("wanted", "name_addresses", "address"),
    [
        ("eth0", (), "192.0.2.77"),
        ("eth0,eth1", (), "192.0.2.77"),
        ("eth7", ("127.0.0.1",), None),
        (None, ("127.0.0.2",), "127.0.0.2"),
        (None, ("192.0.2.77", "127.0.0.2"), "127.0.0.2"),  # the first cannot be bound here
        (None, None, "127.0.0.1"),
        ("", ("127.0.0.2",), "127.0.0.2"),
    ],
)
def test_where_gloo_will_listen(
    wanted: str | None, name_addresses: tuple[str, ...] | None, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str, limit_s: float) -> tuple[str, ...]:
        if name_addresses is None:
            raise OSError("the host's own name has no address")
        return name_addresses

    monkeypatch.setattr("minddp.tools.doctor.fact_sheet.resolve", resolve)
    assert choose_gloo_address(wanted, INTERFACES, 5.0) == address
