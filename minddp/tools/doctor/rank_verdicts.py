"""Judges ranks and hosts: versions, environment, shared memory, load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minddp.platform import wording
from minddp.tools.doctor.fact_sheet import Sheets
from minddp.tools.doctor.measurement import Measurement
from minddp.tools.doctor.report import CheckResult, Severity, differing, judged

# Ranks that differ in one of these cannot communicate, or compute different bits.
DECISIVE = ("torch", "CUDA", "NCCL", "minddp")
# Variables that name interfaces, network cards and GPUs may differ.
MAY_DIFFER = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_IB_HCA", "CUDA_VISIBLE_DEVICES")
SHARED_MEMORY_PER_RANK = 256 * 2**20  # bytes
SHARED_MEMORY_AT_ALL = 16 * 2**20
BUSY = 0.2  # share of its computing time in which a rank has no core; a few hundredths on an idle machine


def judge_sheets(sheets: Sheets) -> list[CheckResult]:
    versions = {rank: sheet.versions for rank, sheet in sheets.items()}
    environments = {rank: sheet.environment for rank, sheet in sheets.items()}
    return [
        *judged("versions", _differences("versions", versions), _listed(versions, "{} {}")),
        *judged("environment", _differences("environment", environments), _listed(environments, "{}={}")),
        *_shared_memory(sheets),
    ]


def _differences(check: str, settings: Mapping[int, Mapping[str, str]]) -> Iterator[CheckResult]:
    for name in dict.fromkeys(name for values in settings.values() for name in values):
        values = {rank: known.get(name, "(unset)") for rank, known in settings.items()}
        if name not in MAY_DIFFER and len(set(values.values())) > 1:
            severity = Severity.BROKEN if name in DECISIVE else Severity.NOTE
            remedy = f"Make {name} the same on every host. torchrun passes on the environment of its own host only."
            yield CheckResult(check, severity, f"{name} is not the same everywhere: {differing(values)}.", remedy)


def _listed(settings: Mapping[int, Mapping[str, str]], form: str) -> str:
    shown = [form.format(*item) for item in settings[min(settings)].items() if item[0] not in MAY_DIFFER]
    return f"{', '.join(shown)}." if shown else "No variable is set that changes torch, NCCL, gloo or minddp."


def _shared_memory(sheets: Sheets) -> Iterator[CheckResult]:
    """One result for each host. DataLoader workers and the shared-memory transport need room in /dev/shm."""
    for ranks in wording.by_value({rank: sheet.host_identity for rank, sheet in sheets.items()}).values():
        sheet = sheets[ranks[0]]
        if (free := sheet.shared_memory_bytes) is None:
            yield CheckResult("shared memory", Severity.FINE, f"{sheet.host}: there is no /dev/shm.")
            continue
        fact = f"{sheet.host}: {wording.size(free)} free in /dev/shm for {wording.count(len(ranks), 'rank')}."
        if free >= SHARED_MEMORY_PER_RANK * len(ranks):
            yield CheckResult("shared memory", Severity.FINE, fact)
            continue
        remedy = (
            "DataLoader workers pass batches through /dev/shm, and die of a bus error when it is full: give the "
            "container more (docker run --shm-size=8g, or --ipc=host)."
        )
        yield CheckResult(
            "shared memory", Severity.BROKEN if free < SHARED_MEMORY_AT_ALL else Severity.NOTE, fact, remedy
        )


def judge_load(sheets: Sheets, measured: Mapping[int, Measurement]) -> list[CheckResult]:
    """On a busy machine the measured times tell nothing about the network."""
    longest = max(measurement.waited for measurement in measured.values())
    fact = f"had no core for up to {longest:.0%} of the time in which they computed."
    busy = {rank: sheets[rank].host for rank, measurement in measured.items() if measurement.waited > BUSY}
    remedy = (
        "End other programs there (top), start fewer ranks, or give them fewer threads (OMP_NUM_THREADS). Until "
        "then the times below are not reliable."
    )
    problems = (
        CheckResult("load", Severity.NOTE, f"{wording.ranks(ranks).capitalize()} on {host} {fact}", remedy)
        for host, ranks in wording.by_value(busy).items()
    )
    return judged("load", problems, f"Ranks {fact}")
