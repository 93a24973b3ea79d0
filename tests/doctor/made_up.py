"""Facts that were never collected: ranks of an imaginary job, all well if nothing is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from minddp.doctor.board import Outcome
from minddp.doctor.facts import GPU, Devices, Interface, Machine, Network, RankFacts, Software
from minddp.doctor.findings import Finding, Verdict

GIB = 2**30

SOFTWARE = Software(
    versions={"Python": "3.11.7", "torch": "2.13.0", "CUDA": "none", "minddp": "0.1.0", "NumPy": "2.4.6"},
    environment={"OMP_NUM_THREADS": "1"},
)
MACHINE = Machine(
    name="a",
    identity="boot of a",
    cores=2.0,
    threads=1,
    load=0.5,
    memory_bytes=16 * GIB,
    shared_memory_bytes=8 * GIB,
    open_files=65536,
)
NETWORK = Network(
    identity="network of a",
    interfaces={"lo": Interface(("127.0.0.1",)), "eth0": Interface(("10.0.0.1",))},
    name_addresses=("10.0.0.1",),
    gloo_address="10.0.0.1",
    store_address="10.0.0.1",
)
CARD = GPU("H200", "GPU-0", 140 * GIB, 139 * GIB)


def rank(number: int, **changed: Any) -> RankFacts:
    """Facts of one rank on host a; parts of it `changed` by name, such as `machine={"cores": 1}`."""
    parts = {"software": SOFTWARE, "machine": MACHINE, "devices": Devices(), "network": NETWORK}
    for name, changes in changed.items():
        parts[name] = dataclasses.replace(parts[name], **changes)
    return RankFacts(rank=number, world_size=2, local_rank=number, pid=100 + number, **parts)


def rank_on(number: int, host: str, address: str, **changed: Any) -> RankFacts:
    """The same on another host, which gloo reaches at `address`."""
    machine = {"name": host, "identity": f"boot of {host}", **changed.pop("machine", {})}
    network = {
        "identity": f"network of {host}",
        "interfaces": {"lo": Interface(("127.0.0.1",)), f"net{host}": Interface((f"10.0.0.{number + 1}",))},
        "name_addresses": (address,),
        "gloo_address": address,
        "store_address": address,
        **changed.pop("network", {}),
    }
    return dataclasses.replace(rank(number, machine=machine, network=network, **changed), local_rank=0)


def job(*ranks: RankFacts) -> dict[int, RankFacts]:
    return {told.rank: dataclasses.replace(told, world_size=len(ranks)) for told in ranks}


def cards(*numbers: int, **changed: Any) -> dict[str, Any]:
    """Devices of a rank that sees the GPUs with these numbers."""
    gpus = tuple(dataclasses.replace(CARD, uuid=f"GPU-{number}", **changed) for number in numbers)
    return {"gpus": gpus, "driver_is_there": True, "torch_has_cuda": True}


def done(values: Mapping[int, Any]) -> dict[int, Outcome]:
    return {number: Outcome("done", value) for number, value in values.items()}


def verdicts(findings: list[Finding]) -> list[Verdict]:
    return [finding.verdict for finding in findings]


def told(findings: list[Finding]) -> str:
    """All facts and remedies as one text."""
    return "\n".join(f"{finding.fact} -> {finding.remedy}" for finding in findings)
