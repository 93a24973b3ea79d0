"""Verdicts on ranks and hosts: versions, environment, devices, cores, memory, load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from minddp.platform import wording
from minddp.tools.doctor.fact_sheet import FactSheet, Sheets
from minddp.tools.doctor.findings import Finding, Severity, differing, judged
from minddp.tools.doctor.measurement import Measurement

Device = Literal["auto", "cpu", "cuda"]
Host = Sequence[FactSheet]  # of its ranks

# Ranks that differ in one of these do not understand each other, or compute different bits.
DECISIVE = ("torch", "CUDA", "NCCL", "minddp")
# Variables that name interfaces, network cards and GPUs may differ.
MAY_DIFFER = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_IB_HCA", "CUDA_VISIBLE_DEVICES")
MEMORY_PER_RANK = 2**30  # bytes; torch itself takes some 300 MiB
SHARED_MEMORY_PER_RANK = 256 * 2**20
SHARED_MEMORY_AT_ALL = 16 * 2**20
BUSY = 0.2  # of the time in which a rank computes; alone on a machine it is a few hundredths


def judge_sheets(sheets: Sheets, wanted: Device) -> list[Finding]:
    ranks_of_host = wording.by_value({rank: sheet.host_identity for rank, sheet in sheets.items()}).values()
    hosts = [[sheets[rank] for rank in ranks] for ranks in ranks_of_host]
    on_gpu = choose_device(sheets, wanted) == "cuda"
    versions = {rank: sheet.versions for rank, sheet in sheets.items()}
    environments = {rank: sheet.environment for rank, sheet in sheets.items()}
    return [
        *judged("versions", _differences("versions", versions), _listed(versions, "{} {}")),
        *judged("environment", _differences("environment", environments), _listed(environments, "{}={}")),
        *judged("devices", _devices(sheets, wanted), _chosen_devices(sheets, wanted)),
        *judged("cores", _cores(hosts, on_gpu), "; ".join(map(_threads_and_cores, hosts)) + "."),
        *judged("memory", _memory(hosts), "; ".join(map(_free_memory, hosts)) + "."),
    ]


def _differences(check: str, settings: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    for name in dict.fromkeys(name for values in settings.values() for name in values):
        values = {rank: known.get(name, "(unset)") for rank, known in settings.items()}
        if name not in MAY_DIFFER and len(wording.by_value(values)) > 1:
            severity = Severity.BROKEN if name in DECISIVE else Severity.NOTE
            remedy = f"Make {name} the same on every host. torchrun passes on the environment of its own host only."
            yield Finding(check, severity, f"{name} is not the same everywhere: {differing(values)}.", remedy)


def _listed(settings: Mapping[int, Mapping[str, str]], form: str) -> str:
    shown = [form.format(*item) for item in settings[min(settings)].items() if item[0] not in MAY_DIFFER]
    return f"{', '.join(shown)}." if shown else "No variable is set that changes torch, NCCL, gloo or minddp."


def choose_device(sheets: Sheets, wanted: Device) -> Literal["cpu", "cuda"]:
    """GPUs if each rank has its own, unless the CPU is wanted."""
    gpus = {sheet.gpu_uuid for sheet in sheets.values()} - {""}
    return "cuda" if wanted != "cpu" and len(gpus) == len(sheets) > 0 else "cpu"


def _devices(sheets: Sheets, wanted: Device) -> Iterator[Finding]:
    """Ranks without their own GPU, unless the CPU is wanted or there is no sign of a GPU anywhere."""
    signs = [bool(sheet.gpu_uuid or sheet.has_nvidia_driver) for sheet in sheets.values()]
    if wanted == "cpu" or choose_device(sheets, wanted) == "cuda" or (wanted == "auto" and not any(signs)):
        return
    gpu_of_rank = {rank: (sheet.host, sheet.gpu_uuid) for rank, sheet in sheets.items()}
    for (host, gpu), ranks in wording.by_value(gpu_of_rank).items():
        if gpu and len(ranks) == 1:
            continue
        sheet = sheets[ranks[0]]
        driver = f"{'an' if sheet.has_nvidia_driver else 'no'} NVIDIA driver"
        visible = sheet.environment.get("CUDA_VISIBLE_DEVICES", "(unset)")
        fact = (
            f"{wording.ranks(ranks).capitalize()} on {host}: "
            f"{f'one {sheet.gpu_name} together, which NCCL refuses' if gpu else 'no GPU in torch'} (torch for CUDA "
            f"{sheet.versions['CUDA']}, {driver}, CUDA_VISIBLE_DEVICES={visible})."
        )
        remedy = (
            "Start as many ranks on a host as it has GPUs, each with its own LOCAL_RANK or CUDA_VISIBLE_DEVICES. "
            "If nvidia-smi shows GPUs, install torch for CUDA. The checks below use the CPU and gloo."
        )
        yield Finding("devices", Severity.BROKEN if wanted == "cuda" else Severity.NOTE, fact, remedy)


def _chosen_devices(sheets: Sheets, wanted: Device) -> str:
    if choose_device(sheets, wanted) == "cpu":
        return f"The CPU, with gloo: {'as --device cpu asks' if wanted == 'cpu' else 'no rank has a GPU'}."
    models = wording.by_value({rank: sheet.gpu_name for rank, sheet in sheets.items()})
    return f"A GPU for each of {wording.count(len(sheets), 'rank')}: {wording.joined(list(models))}."


def _cores(hosts: Sequence[Host], on_gpu: bool) -> Iterator[Finding]:
    for host in hosts:
        cores, threads = host[0].cores, sum(sheet.threads for sheet in host)
        share = max(1, int(cores / len(host)))
        remedy = f"export OMP_NUM_THREADS={share}, or call torch.set_num_threads({share}) in the script."
        if len(host) > cores:
            problem, remedy = "ranks take turns", f"Start at most {wording.count(share, 'rank')} there."
        elif threads > cores:
            problem = "threads take turns, which is slower than fewer threads"
        elif not on_gpu and share >= 2 and threads <= cores / 2:
            problem = f"{cores - threads:g} cores are idle. torchrun and minddp doctor set 1 thread by default"
        else:
            continue
        yield Finding("cores", Severity.NOTE, f"{_threads_and_cores(host)}: {problem}.", remedy)


def _threads_and_cores(host: Host) -> str:
    threads = wording.count(sum(sheet.threads for sheet in host), "thread")
    ranks = wording.count(len(host), "rank")
    return f"{host[0].host}: {ranks} with {threads} on {wording.count(host[0].cores, 'core')}"


def _memory(hosts: Sequence[Host]) -> Iterator[Finding]:
    for host in hosts:
        if host[0].memory_bytes < MEMORY_PER_RANK * len(host):
            remedy = (
                "Without memory the kernel kills ranks (exit code -9): start fewer, or raise the container's limit."
            )
            yield Finding("memory", Severity.NOTE, f"{_free_memory(host)}.", remedy)
        shared = host[0].shared_memory_bytes
        if shared is not None and shared < SHARED_MEMORY_PER_RANK * len(host):
            severity = Severity.BROKEN if shared < SHARED_MEMORY_AT_ALL else Severity.NOTE
            remedy = (
                "DataLoader workers pass batches through /dev/shm, and die of a bus error when it is full: give "
                "the container more (docker run --shm-size=8g, or --ipc=host)."
            )
            yield Finding("memory", severity, f"{_free_memory(host)}.", remedy)


def _free_memory(host: Host) -> str:
    memory, shared = wording.size(host[0].memory_bytes), host[0].shared_memory_bytes
    in_shm = "" if shared is None else f" and {wording.size(shared)} free in /dev/shm"
    return f"{host[0].host}: {memory} free{in_shm} for {wording.count(len(host), 'rank')}"


def judge_load(sheets: Sheets, measured: Mapping[int, Measurement]) -> list[Finding]:
    """Ranks had a core when they computed. If not, times tell about the machine, and nothing about the network."""
    longest = max(measurement.waited for measurement in measured.values())
    fact = f"had no core for up to {longest:.0%} of the time in which they computed."
    busy = {rank: sheets[rank].host for rank, measurement in measured.items() if measurement.waited > BUSY}
    remedy = "End other programs there (top), or start fewer ranks; until then the times below are not reliable."
    problems = (
        Finding("load", Severity.NOTE, f"{wording.ranks(ranks).capitalize()} on {host} {fact}", remedy)
        for host, ranks in wording.by_value(busy).items()
    )
    return judged("load", problems, f"Ranks {fact}")
