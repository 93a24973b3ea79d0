"""Do all ranks run the same programs, with the same settings?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minddp.doctor.facts import RankFacts, Software
from minddp.doctor.findings import Finding, Verdict, by_value, differing, name_ranks

# What ranks cannot differ in: they would not understand each other, or compute different bits.
DECISIVE = ("torch", "CUDA", "NCCL", "minddp", "minddp's source")
SHOWN = ("Python", "torch", "CUDA", "NCCL", "minddp", "NumPy")

# Variables that may differ from host to host, where interfaces and cards have other names.
OF_THE_HOST = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_IB_HCA")
OF_THE_RANK = ("CUDA_VISIBLE_DEVICES",)

SLOWING = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "every kernel is waited for, so nothing overlaps",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is checked by others before it",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of one host do not talk directly",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of one host talk through the network",
    ("NCCL_IB_DISABLE", "1"): "InfiniBand is not used",
    ("NCCL_DEBUG", "TRACE"): "every call is logged",
}


def judge_software(facts: Mapping[int, RankFacts]) -> list[Finding]:
    software = {rank: told.software for rank, told in facts.items()}
    hosts = {rank: told.network.identity for rank, told in facts.items()}
    return [
        *(list(_different_versions(software)) or [_same_versions(software)]),
        *(list(_settings(software, hosts)) or [_plain_settings(software)]),
    ]


def _different_versions(software: Mapping[int, Software]) -> Iterator[Finding]:
    names = dict.fromkeys(name for told in software.values() for name in told.versions)
    for name in names:
        versions = {rank: told.versions.get(name, "unknown") for rank, told in software.items()}
        if len(set(versions.values())) > 1:
            decisive = name in DECISIVE
            yield Finding(
                "versions",
                Verdict.BROKEN if decisive else Verdict.NOTE,
                f"{name} is not the same everywhere: {differing(versions)}.",
                f"Install one version of {name.removesuffix(chr(39) + 's source')} on every host."
                if decisive
                else "It may work; install the same on every host to be sure, and to get the same bits.",
            )


def _same_versions(software: Mapping[int, Software]) -> Finding:
    versions = next(iter(software.values())).versions
    shown = [f"{name} {versions[name]}" for name in SHOWN if versions.get(name, "none") != "none"]
    where = "" if len(software) == 1 else " on every rank"
    return Finding("versions", Verdict.FINE, f"{', '.join(shown)}{where}.")


def _settings(software: Mapping[int, Software], hosts: Mapping[int, str]) -> Iterator[Finding]:
    for name in sorted({name for told in software.values() for name in told.environment}):
        values = {rank: told.environment.get(name, "(unset)") for rank, told in software.items()}
        if len(set(values.values())) > 1 and not _may_differ(name, values, hosts):
            yield Finding(
                "environment",
                Verdict.NOTE,
                f"{name} is not the same everywhere: {differing(values)}.",
                f"Export the same {name} on every host, or in none: torchrun passes on the environment of its own "
                f"host only.",
            )
        for value, ranks in by_value(values).items():
            if (name, value.upper()) in SLOWING:
                where = "" if len(ranks) == len(software) else f" on {name_ranks(ranks)}"
                yield Finding(
                    "environment",
                    Verdict.NOTE,
                    f"{name}={value}{where}: {SLOWING[name, value.upper()]}.",
                    f"For speed, unset {name} when you have found what you look for.",
                )


def _may_differ(name: str, values: Mapping[int, str], hosts: Mapping[int, str]) -> bool:
    """Whether the differences are those between hosts, in a variable of which one expects it."""
    if name in OF_THE_RANK:
        return True
    per_host = {(hosts[rank], value) for rank, value in values.items()}
    return name in OF_THE_HOST and len(per_host) == len(set(hosts.values()))


def _plain_settings(software: Mapping[int, Software]) -> Finding:
    first = next(iter(software.values())).environment
    same = [f"{name}={value}" for name, value in first.items() if name not in OF_THE_RANK + OF_THE_HOST]
    if not same:
        return Finding(
            "environment", Verdict.FINE, "Nothing is set that changes what torch, NCCL, gloo or minddp do."
        )
    where = "" if len(software) == 1 else " on every rank"
    return Finding("environment", Verdict.FINE, f"{', '.join(same)}{where}.")
