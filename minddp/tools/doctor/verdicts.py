"""Judges facts and measurements of all ranks. Pure functions."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from minddp.platform import wording
from minddp.tools.doctor.measurement import Sheets
from minddp.tools.forecast.link import Link
from minddp.tools.job.place import Place
from minddp.tools.job.store_connection import StoreUnreachable

# Ranks that differ in one of these cannot communicate, or compute different bits.
DECISIVE = ("torch", "CUDA", "NCCL", "minddp", "device")
MAY_DIFFER = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_IB_HCA", "CUDA_VISIBLE_DEVICES")
SLOW_BYTES_PER_S = 100e6  # about a gigabit a second
SLOW_LATENCY_S = 5e-3


class Severity(str, enum.Enum):
    """Only BROKEN keeps a job from working."""

    FINE = "fine"
    NOTE = "note"
    BROKEN = "BROKEN"


@dataclass(frozen=True)
class CheckResult:
    """The `fact` names ranks and hosts; the `remedy` is empty if nothing is wrong."""

    check: str
    severity: Severity
    fact: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.severity.value:<6}  {self.check}: {self.fact}"
        return f"{line}\n        -> {self.remedy}" if self.remedy else line


def judge_obstacle(place: Place, error: StoreUnreachable) -> CheckResult:
    """This rank did not reach the store."""
    endpoint = " ".join([place.endpoint, *(f"({address})" for address in error.resolved)])
    fact = f"Rank {place.rank} cannot use the store at {endpoint}: {error.obstacle}."
    remedy = (
        "MASTER_ADDR must be an address of rank 0's host, in a network that this host is in too (`ip addr`), or a "
        "name that is known here. MASTER_PORT must be the same on every rank, free on rank 0's host (`ss -ltnp`) "
        "and open in the firewall. Start rank 0 within the time limit (--timeout-s)."
    )
    return CheckResult("rendezvous", Severity.BROKEN, fact, remedy)


def judge_arrivals(place: Place, sheets: Sheets, limit_s: float) -> CheckResult:
    """Each rank has arrived at the store."""
    present = _by_rank({rank: sheet.host for rank, sheet in sheets.items()})
    missing = [rank for rank in range(place.world_size) if rank not in sheets]
    if not missing:
        ranks = wording.count(place.world_size, "rank")
        return CheckResult("rendezvous", Severity.FINE, f"{ranks} met at {place.endpoint}: {present}.")
    fact = f"{wording.subject(missing, 'has', 'have')} not arrived within {limit_s:g} s. Present: {present}."
    remedy = (
        f"Start all ranks with WORLD_SIZE={place.world_size} MASTER_ADDR={place.address} MASTER_PORT={place.port}, "
        f"each with its own RANK (torchrun: --node-rank), within the time limit (--timeout-s). If a missing rank "
        f"did start, see what minddp doctor printed there."
    )
    return CheckResult("rendezvous", Severity.BROKEN, fact, remedy)


def judge_settings(sheets: Sheets) -> list[CheckResult]:
    """Versions, the device and environment variables are equal on all ranks."""
    problems, listed = [], []
    for name in dict.fromkeys(name for sheet in sheets.values() for name in sheet.settings):
        values = {rank: sheet.settings.get(name, "(unset)") for rank, sheet in sheets.items()}
        if len(set(values.values())) == 1:
            listed.append(f"{name} {values[0]}")
        elif name not in MAY_DIFFER:
            severity = Severity.BROKEN if name in DECISIVE else Severity.NOTE
            fact = f"{name} is not the same everywhere: {_by_rank(values)}."
            remedy = f"Make {name} the same on every host. torchrun passes on the environment of its own host only."
            problems.append(CheckResult("settings", severity, fact, remedy))
    return problems or [CheckResult("settings", Severity.FINE, f"{', '.join(listed)}.")]


def judge_network(sheets: Sheets, errors: Mapping[int, str]) -> CheckResult:
    """The ranks can connect to each other, so that a process group works."""
    listening = f"gloo listens at {_by_rank({rank: sheet.address for rank, sheet in sheets.items()})}."
    if not errors:
        fact = f"{wording.count(len(sheets), 'rank')} can connect, and their sum is right; {listening}"
        return CheckResult("network", Severity.FINE, fact)
    failed = {rank: f"{error} ({sheets[rank].host})" for rank, error in errors.items()}
    remedy = (
        "Open all TCP ports between the hosts. Where gloo listens at the loopback (127.0.0.1), set "
        "GLOO_SOCKET_IFNAME to the interface that leads to the others, or give the host's own name its true "
        "address in /etc/hosts. See the output of these ranks; NCCL_DEBUG=WARN, or TORCH_CPP_LOG_LEVEL=INFO for "
        "gloo, makes a job say more."
    )
    fact = f"The process group failed: {_by_rank(failed)}; {listening}"
    return CheckResult("network", Severity.BROKEN, fact, remedy)


def judge_link(link: Link) -> CheckResult:
    """An all-reduce is not slow."""
    fact = f"An all-reduce takes {link.latency_s * 1e3:.2f} ms, then {link.bytes_per_s / 1e9:.2f} GB/s."
    if link.latency_s <= SLOW_LATENCY_S and link.bytes_per_s >= SLOW_BYTES_PER_S:
        return CheckResult("link", Severity.FINE, fact)
    remedy = "Is the fastest network used (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)? Does anything else run there?"
    return CheckResult("link", Severity.NOTE, fact, remedy)


def _by_rank(value_of_rank: Mapping[int, str]) -> str:
    """The ranks grouped by value: `2.13.0 on ranks 0-2; 2.12.1 on rank 3`."""
    groups = wording.by_value(value_of_rank).items()
    return "; ".join(f"{value} on {wording.ranks(ranks)}" for value, ranks in groups)
